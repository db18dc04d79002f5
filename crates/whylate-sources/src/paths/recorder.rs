// SPDX-License-Identifier: MIT OR Apache-2.0
//! Records the scheduling timeline of all CPUs over any length of time, in bounded memory.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::rc::Rc;

use anyhow::Context as _;
use rustix::fs::{CWD, Mode, OFlags, fstatvfs, openat};
use whylate_model::path::history::{RunSlice, SwitchOut};
use whylate_model::path::members::Births;
use whylate_model::path::packed::Packed;
use whylate_model::path::stolen::Spread;
use whylate_model::reclaim::ReclaimRecords;

use super::asleep::Asleep;
use super::contended::{ContendedLocks, LoadingLocks, without_locks};
use super::lasting::LastingWaits;
use super::lock_waits::LockWaits;
use super::names::PathNames;
use super::ran::RanThreads;
use super::reclaim::ReclaimRecorder;
use crate::cpu_account::{Edges, Stream};
use crate::kernel::attach::silence_libbpf;
use crate::kernel::symbols::ReadOnce;
use crate::kernel::{clock, cpus};
use crate::source::AttachError;
use crate::source::session::Session;

/// Memory of the timeline; beyond that it spills into a file.
const MEMORY_BYTES: usize = 64 << 20;
/// Space to leave free on the file system, or a twentieth of a smaller one.
const RESERVED_BYTES: u64 = 1 << 30;
/// Growth of the file between checks of the free space, in bytes.
const FILE_STEP_BYTES: u64 = 4 << 20;
/// Events more recent than this may not be in the ring yet.
const SETTLED_NS: u64 = 2_000_000;
/// Maximum number of recorded thread exits.
const MAX_DEATHS: usize = 1 << 20;
/// Directories for large files: /tmp is often in memory.
const DIRECTORIES: [&str; 2] = ["/var/tmp", "/tmp"];

/// Reads slices until a timestamp.
type Read = fn(&mut Stream, u64, &mut dyn FnMut(usize, RunSlice));

/// Records what all CPUs do, from its start on.
pub struct Recorder {
    edges: Edges,
    stream: Stream,
    past: Packed<File>,
    /// Size of the file at the last check of the free space.
    file_bytes: u64,
    births: Births,
    asleep: Asleep,
    lasting: LastingWaits,
    locks: Option<ContendedLocks>,
    /// Why the locks of short waits have no names, if they have none.
    limitation: Option<String>,
    deaths: Vec<(u32, u64)>,
    ran: RanThreads,
    /// Or why reclaim is not recorded.
    reclaim: Result<ReclaimRecorder, AttachError>,
    /// Start of the span that is explained.
    span_from_ns: u64,
    lost: BTreeMap<String, u64>,
    names: PathNames,
}

/// A finished recording.
pub struct Recorded {
    /// Scheduling timeline of all CPUs.
    pub past: Spread<Packed<File>>,
    /// Parents of the threads.
    pub births: Births,
    /// TIDs and times of thread exits, in time order on each CPU.
    pub deaths: Vec<(u32, u64)>,
    /// Events that were lost, by reason.
    pub lost: BTreeMap<String, u64>,
    /// Names for the IDs in the timeline.
    pub names: PathNames,
    /// When threads reclaimed memory, or why this is not known.
    pub reclaim: Result<ReclaimRecords, AttachError>,
}

impl Recorder {
    /// Starts recording.
    ///
    /// # Errors
    /// Fails if the kernel refuses a BPF program.
    pub fn start() -> Result<Self, AttachError> {
        silence_libbpf();
        let _once = ReadOnce::begin();
        let locks = LoadingLocks::begin();
        let session = Session::of_one();
        let reclaim = ReclaimRecorder::load();
        let edges = Edges::attach()?;
        let stream = edges.stream().context("the account keeps no wakeups")?;
        let cpus = cpus::highest_possible().context("cannot list the CPUs")? + 1;
        let file = DIRECTORIES.iter().find_map(|directory| unnamed_file(Path::new(directory)).ok());
        let past = Packed::new(cpus as usize, MEMORY_BYTES, file);
        let symbols = session.symbols();
        // At the end of the span, the user waits for the answer.
        symbols.load();
        let lock_waits = Rc::<RefCell<LockWaits>>::default();
        let (locks, limitation) = match locks.attach(&lock_waits) {
            Ok(locks) => (Some(locks), None),
            Err(error) => (None, Some(without_locks(&error))),
        };
        let names = PathNames::new(symbols, lock_waits);
        let (lasting, asleep) = LastingWaits::start();
        Ok(Recorder {
            edges,
            stream,
            past,
            file_bytes: 0,
            births: Births::default(),
            asleep,
            lasting,
            locks,
            limitation,
            deaths: Vec::new(),
            ran: RanThreads::default(),
            reclaim: reclaim.and_then(ReclaimRecorder::attach),
            span_from_ns: u64::MAX,
            lost: BTreeMap::new(),
            names,
        })
    }

    /// Returns how the recording is less precise on this machine, if it is.
    pub fn limitation(&self) -> Option<&str> {
        self.limitation.as_deref()
    }

    /// Reads new slices. Call it several times a second, or they are overwritten.
    pub fn take_in(&mut self) {
        if let Ok(reclaim) = &mut self.reclaim {
            reclaim.take_in();
        }
        self.take_in_by(Stream::drain, clock::monotonic_ns().saturating_sub(SETTLED_NS));
        if self.past.in_file_bytes() >= self.file_bytes + FILE_STEP_BYTES {
            self.file_bytes = self.past.in_file_bytes();
            if self.past.file().is_some_and(|file| !has_room(file)) {
                self.past.give_up_file();
            }
        }
    }

    fn take_in_by(&mut self, read: Read, until_ns: u64) {
        self.locks.iter().for_each(ContendedLocks::take_in);
        let (past, births, asleep) = (&mut self.past, &mut self.births, &mut self.asleep);
        let (deaths, ran, span_from_ns) = (&mut self.deaths, &mut self.ran, self.span_from_ns);
        read(&mut self.stream, until_ns, &mut |cpu, slice| {
            births.add(&slice);
            asleep.add(&slice);
            if let (SwitchOut::Dead, Some(tid)) = (slice.exit, slice.holder.tid()) {
                match deaths.len() < MAX_DEATHS {
                    true => deaths.push((tid, slice.end_ns)),
                    false => births.lost += 1,
                }
            }
            if slice.end_ns > span_from_ns {
                ran.add(&slice);
            }
            past.push(cpu, slice);
        });
    }

    /// Sets the start of the span that will be explained: what threads did before it is not looked at.
    pub fn span_begins(&mut self, at_ns: u64) {
        self.span_from_ns = at_ns;
    }

    /// Also reads the objects of waits of these threads that began before the recording.
    pub fn wants(&self, threads: impl Iterator<Item = u32>) {
        self.lasting.want(threads);
    }

    /// Stops reading objects: later waits are not in the recording.
    pub fn span_ends(&mut self) {
        self.lasting.end();
    }

    /// Returns whether the recording shows why the thread is stopped, if it is: the thread ran in the span, and no
    /// tracer stopped it. Who the tracer is, the recording does not show.
    pub fn shows_stop(&self, tid: u32) -> bool {
        self.ran.ran_untraced(tid)
    }

    /// Ends the recording at `until_ns`, which must be in the past.
    pub fn finish(mut self, until_ns: u64) -> Recorded {
        // A thread that has just exited is switched out a bit later.
        while clock::monotonic_ns() < until_ns + 2 * SETTLED_NS {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        self.take_in_by(Stream::finish, until_ns + SETTLED_NS);
        for (reason, count) in self.edges.take_lost() {
            *self.lost.entry(reason.to_owned()).or_default() += count;
        }
        let unkept = self.locks.as_mut().map_or(0, ContendedLocks::take_lost);
        self.lost.insert("lock_waits_unread".to_owned(), unkept);
        let Recorder { past, births, asleep, lasting, deaths, reclaim, mut lost, mut names, .. } = self;
        let reclaim = reclaim.map(|reclaim| reclaim.finish(until_ns, &mut lost));
        let objects = lasting.take();
        lost.insert("wait_objects_unread".to_owned(), objects.unread);
        names.knows(asleep.calls(), objects);
        lost.insert("births_full".to_owned(), births.lost);
        lost.insert("records_given_up".to_owned(), past.given_up());
        Recorded { past: Spread::new(past), births, deaths, lost, names, reclaim }
    }
}

/// Tests whether the file system has enough space left: as root, whylate could take the reserved blocks.
fn has_room(file: &File) -> bool {
    fstatvfs(file).is_ok_and(|about| {
        let bytes = |blocks: u64| blocks.saturating_mul(about.f_frsize);
        bytes(about.f_bavail) >= (bytes(about.f_blocks) / 20).min(RESERVED_BYTES)
    })
}

/// Creates a file that is removed when it is closed, even by a crash.
fn unnamed_file(directory: &Path) -> rustix::io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(openat(CWD, directory, flags, Mode::RUSR | Mode::WUSR)?.into())
}
