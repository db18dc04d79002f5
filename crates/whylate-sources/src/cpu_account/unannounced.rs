// SPDX-License-Identifier: MIT OR Apache-2.0
//! Wakers where interrupts have no tracepoints, as on Hyper-V: the programs at interrupts are left out.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use libbpf_rs::skel::Skel as _;
use whylate_model::path::history::{CpuTimeline as _, SwitchIn, Waker};

use super::{Account, SharedAccount, Timers, Wakeups};
use crate::kernel::clock::monotonic_ns;
use crate::kernel::cpu_choice;
use crate::kernel::priority::run_on;

const RUN_TIME: Duration = Duration::from_millis(500);
/// Time in which the threads start.
const SETTLE_NS: u64 = 150_000_000;

/// Buffer of direct I/O.
#[repr(align(4096))]
struct Page([u8; 4096]);

/// Attaches an account without its programs at interrupts and, unless `has_softirqs`, at softirqs.
fn attached(has_softirqs: bool) -> Account {
    let account = Account::load(&SharedAccount::new(false, &[]), Timers::Ticks, Wakeups::OfAll).expect("it loads");
    {
        let mut state = account.state.borrow_mut();
        let names: Vec<String> =
            state.skeleton.object().progs().map(|program| program.name().to_string_lossy().into_owned()).collect();
        let of_interrupts = |name: &String| {
            let is_pair = name.ends_with("_entry") || name.ends_with("_exit");
            is_pair && !(has_softirqs && name.contains("softirq")) && !name.contains("hrtimer")
        };
        state.attached.extend(names.into_iter().filter(of_interrupts));
        state.attach(true).expect("it attaches");
    }
    account
}

fn tid() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

/// Creates a file on a disk that completes reads in interrupts. `None` if the build directory is on no disk.
fn file_on_disk() -> Option<File> {
    let tests = std::env::current_exe().expect("there is a program");
    let file = tempfile::tempfile_in(tests.parent()?).expect("a file");
    if libc::major(file.metadata().expect("it is open").dev()) == 0 {
        return None;
    }
    file.write_all_at(&[1; 4096], 0).expect("there is room");
    file.sync_all().expect("there is room");
    let again = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(again).ok()
}

/// Returns how the thread was switched in after each of its waits.
fn switch_ins_of(account: &Account, tid: u32) -> Vec<SwitchIn> {
    let mut history = account.history(monotonic_ns()).expect("edges are kept");
    let mut entries = Vec::new();
    for cpu in 0..history.cpus() {
        while let Some(slice) = history.previous(cpu) {
            if slice.holder.tid() == Some(tid) && matches!(slice.entry, SwitchIn::Woken { .. } | SwitchIn::Unseen) {
                entries.push(slice.entry);
            }
        }
    }
    entries
}

fn count(entries: &[SwitchIn], is_it: impl Fn(&SwitchIn) -> bool) -> usize {
    entries.iter().filter(|entry| is_it(entry)).count()
}

#[test]
fn interrupted_thread_is_not_recorded_as_waker() {
    if !rustix::process::geteuid().is_root() || crate::kernel::attach::require_btf().is_err() {
        println!("skipped: needs root and a kernel with BTF");
        return;
    }
    let cpu = cpu_choice::usable().expect("there are CPUs").last().copied().expect("one is usable");
    for has_softirqs in [true, false] {
        let mut account = attached(has_softirqs);
        let unseen = unseen_on(&account, cpu, has_softirqs);
        let lost = account.take_lost();
        let by_interrupts =
            lost.iter().find(|(reason, _)| *reason == "unseen_interrupts").map_or(0, |&(_, count)| count);
        println!("{unseen} unseen, {by_interrupts} counted as unseen interrupts");
        // The kernel skips a program that it interrupts, so that a few wakeups are not seen at all.
        assert!(by_interrupts * 100 >= unseen as u64 * 95, "{lost:?} of {unseen} are counted");
    }
}

/// Counts unseen wakers of threads that interrupts wake while another thread is busy. The busy thread wakes none.
fn unseen_on(account: &Account, cpu: u32, has_softirqs: bool) -> usize {
    let over = AtomicBool::new(false);
    // Writing it to the disk may take longer than the run.
    let file = file_on_disk();
    let until = Instant::now() + RUN_TIME;
    let settled_ns = monotonic_ns() + SETTLE_NS;
    let (busy, sleeper, reader, [ping, pong]) = thread::scope(|scope| {
        let busy = scope.spawn(|| {
            run_on(&[cpu]).expect("it is online");
            while !over.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
            tid()
        });
        // Timers and requests complete in interrupts of the busy thread.
        let sleeper = scope.spawn(|| {
            run_on(&[cpu]).expect("it is online");
            while Instant::now() < until {
                thread::sleep(Duration::from_micros(500));
            }
            tid()
        });
        let reader = scope.spawn(|| {
            let file = file.as_ref()?;
            let mut page = Box::new(Page([0; 4096]));
            run_on(&[cpu]).expect("it is online");
            while Instant::now() < until {
                file.read_exact_at(&mut page.0, 0).ok()?;
            }
            Some(tid())
        });
        let (mut from_ping, mut to_pong) = std::io::pipe().expect("a pipe");
        let (mut from_pong, mut to_ping) = std::io::pipe().expect("a pipe");
        let pong = scope.spawn(move || {
            while from_ping.read_exact(&mut [0]).is_ok() && to_ping.write_all(&[0]).is_ok() {}
            tid()
        });
        let ping = scope.spawn(move || {
            while Instant::now() < until {
                to_pong.write_all(&[0]).expect("it is read");
                from_pong.read_exact(&mut [0]).expect("it is written");
            }
            tid()
        });
        let [sleeper, ping, pong] = [sleeper, ping, pong].map(|thread| thread.join().expect("it does not panic"));
        let reader = reader.join().expect("it does not panic");
        over.store(true, Ordering::Relaxed);
        (busy.join().expect("it does not panic"), sleeper, reader, [ping, pong])
    });
    let by =
        |entry: &SwitchIn, tid: u32| matches!(entry, SwitchIn::Woken { by: Waker::Thread(waker), .. } if *waker == tid);
    // While the threads start, they wait for locks of their process, and the busy one may wake another.
    let is_settled = |entry: &SwitchIn| matches!(entry, SwitchIn::Woken { at_ns, .. } if *at_ns > settled_ns);
    let mut unseen = 0;
    for (name, tid) in [("sleeper", Some(sleeper)), ("reader", reader)] {
        let Some(tid) = tid else { continue };
        let entries = switch_ins_of(account, tid);
        let [by_busy, by_any, not_seen] = [
            count(&entries, |entry| by(entry, busy) && is_settled(entry)),
            count(&entries, |entry| matches!(entry, SwitchIn::Woken { by: Waker::Thread(_), .. }) && is_settled(entry)),
            count(&entries, |entry| *entry == SwitchIn::Unseen),
        ];
        println!(
            "{name}, with softirqs {has_softirqs}: {} waits ended, {not_seen} by an unseen waker, {by_any} by a thread",
            entries.len()
        );
        assert_eq!(by_busy, 0, "{name}: the busy thread wakes no thread");
        // A kernel thread may complete requests for others.
        assert!(by_any * 50 <= entries.len(), "{name}: {by_any} of {} waits are ended by threads", entries.len());
        // On a disk with one queue, requests complete in softirqs, which have tracepoints.
        let least = if name == "reader" && has_softirqs { 0 } else { 20 };
        assert!(not_seen >= least, "{name}: {not_seen} of {} wakers are unseen", entries.len());
        unseen += not_seen;
    }
    for (tid, other) in [(ping, pong), (pong, ping)] {
        let entries = switch_ins_of(account, tid);
        let known = count(&entries, |entry| by(entry, other));
        println!("pipe: {known} of {} waits are ended by the other thread", entries.len());
        assert!(known >= 20 && known * 50 >= entries.len() * 49, "{known} of {} wakers are known", entries.len());
    }
    unseen
}
