// SPDX-License-Identifier: MIT OR Apache-2.0
//! A file system that answers until it is told to be silent, as a network file system does whose server is gone: whoever
//! reads an unread page of its files waits, and so does whoever waits for a lock that is held meanwhile.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// Operations of FUSE (include/uapi/linux/fuse.h).
const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

/// A request's header, and what the largest one has behind it.
const HEADER_BYTES: usize = 40;
const REQUEST_BYTES: usize = 1 << 20;

/// Mounted until it is dropped; whoever waits for it then gets an error.
pub struct SilentFiles {
    folder: tempfile::TempDir,
    is_silent: Arc<AtomicBool>,
    has_ended: Arc<AtomicBool>,
    server: Option<JoinHandle<()>>,
}

impl SilentFiles {
    /// Files by their names. `None` where this kernel has no FUSE, or we may not mount it.
    pub fn mount(files: BTreeMap<String, Vec<u8>>) -> Result<Option<Self>> {
        let Ok(device) = OpenOptions::new().read(true).write(true).open("/dev/fuse") else { return Ok(None) };
        let folder = tempfile::tempdir()?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let options = std::ffi::CString::new(options)?;
        if mount("whylate-test", folder.path(), "fuse", MountFlags::NOSUID, options.as_c_str()).is_err() {
            return Ok(None);
        }
        let is_silent = Arc::new(AtomicBool::new(false));
        let has_ended = Arc::new(AtomicBool::new(false));
        let server = Server { files: files.into_iter().collect(), device, is_silent: Arc::clone(&is_silent) };
        let ended_there = Arc::clone(&has_ended);
        let server = thread::spawn(move || server.answer_until(&ended_there));
        Ok(Some(SilentFiles { folder, is_silent, has_ended, server: Some(server) }))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// From now on nobody gets an answer.
    pub fn be_silent(&self) {
        self.is_silent.store(true, Ordering::SeqCst);
    }
}

impl Drop for SilentFiles {
    fn drop(&mut self) {
        // The server closes the device, which ends all requests.
        self.has_ended.store(true, Ordering::SeqCst);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
        let _ = unmount(self.folder.path(), UnmountFlags::DETACH);
    }
}

struct Server {
    /// The first has node 2, as node 1 is the folder.
    files: Vec<(String, Vec<u8>)>,
    device: File,
    is_silent: Arc<AtomicBool>,
}

impl Server {
    fn answer_until(mut self, has_ended: &AtomicBool) {
        let mut request = vec![0; REQUEST_BYTES];
        while !has_ended.load(Ordering::SeqCst) {
            let a_moment = Timespec::try_from(Duration::from_millis(20)).ok();
            let is_asked = poll(&mut [PollFd::new(&self.device, PollFlags::IN)], a_moment.as_ref());
            if !is_asked.is_ok_and(|count| count > 0) {
                continue;
            }
            let Ok(bytes) = self.device.read(&mut request) else { continue };
            if self.is_silent.load(Ordering::SeqCst) {
                continue;
            }
            if let Some(answer) = self.answer(&request[..bytes]) {
                let _ = self.device.write_all(&answer);
            }
        }
    }

    /// `None` where none is expected.
    fn answer(&self, request: &[u8]) -> Option<Vec<u8>> {
        let int = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().expect("four"));
        let long = |at: usize| u64::from_ne_bytes(request[at..at + 8].try_into().expect("eight"));
        let (operation, node, body) = (int(4), long(16), HEADER_BYTES);
        let told: Result<Vec<u8>, i32> = match operation {
            FORGET | BATCH_FORGET | INTERRUPT => return None,
            INIT => Ok(initialised()),
            LOOKUP => {
                let name = request[body..].split(|&byte| byte == 0).next().unwrap_or_default();
                let place = self.files.iter().position(|(known, _)| known.as_bytes() == name);
                place.map(|place| self.entry(place as u64 + 2)).ok_or(libc::ENOENT)
            }
            // For a second nobody asks again.
            GETATTR => Ok([&1_u64.to_ne_bytes()[..], &[0; 8], &self.attributes(node)].concat()),
            OPEN => Ok(vec![0; 16]),
            READ => {
                let bytes = &self.files[node as usize - 2].1;
                let begin = (long(body + 8) as usize).min(bytes.len());
                let end = (begin + int(body + 16) as usize).min(bytes.len());
                Ok(bytes[begin..end].to_vec())
            }
            STATFS => Ok(vec![0; 80]),
            RELEASE | FLUSH => Ok(Vec::new()),
            _ => Err(libc::ENOSYS),
        };
        let (error, body) = told.map_or_else(|error| (-error, Vec::new()), |body| (0, body));
        let length = 16 + body.len() as u32;
        Some([&length.to_ne_bytes()[..], &error.to_ne_bytes(), &long(8).to_ne_bytes(), &body].concat())
    }

    fn entry(&self, node: u64) -> Vec<u8> {
        let valid = [&1_u64.to_ne_bytes()[..], &1_u64.to_ne_bytes(), &[0; 8]].concat();
        [&node.to_ne_bytes()[..], &[0; 8], &valid, &self.attributes(node)].concat()
    }

    fn attributes(&self, node: u64) -> Vec<u8> {
        let (mode, size) = match node {
            1 => (0o040_755_u32, 0),
            _ => (0o100_755, self.files[node as usize - 2].1.len() as u64),
        };
        let blocks_and_times = [0; 44];
        let rest = [mode, 1, 0, 0, 0, 4096, 0].map(u32::to_ne_bytes).concat();
        [&node.to_ne_bytes()[..], &size.to_ne_bytes(), &blocks_and_times, &rest].concat()
    }
}

/// Pages are asked for one by one, so that what nobody has read is in no cache.
fn initialised() -> Vec<u8> {
    let mut told = vec![0; 64];
    told[0..4].copy_from_slice(&7_u32.to_ne_bytes());
    told[4..8].copy_from_slice(&31_u32.to_ne_bytes());
    told[20..24].copy_from_slice(&(128_u32 << 10).to_ne_bytes());
    told[24..28].copy_from_slice(&1_u32.to_ne_bytes());
    told
}

/// Bytes of a file that is mapped.
pub const LENGTH: usize = 4096;

/// The thread that sleeps in a process that nobody can look into.
pub const SLEEPER: &str = "in silence";
/// The thread that waits to change its process's memory.
const CHANGER: &str = "changes memory";

const FILE: &str = "WHYLATE_SILENT_FILE";
const KIND: &str = "WHYLATE_SILENT_KIND";
const READY: &str = "mapped at ";

/// What of a process does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The stack of a thread is in a silent file.
    Stack,
    /// Somebody reads its memory for ever, and a thread of its own waits to change it: nobody else gets to read it.
    Memory,
}

/// A process whose memory does not answer, once its file is silent. It goes with this.
pub struct Unanswering {
    process: Child,
    mapped_at: u64,
    reader: Option<JoinHandle<()>>,
}

impl Unanswering {
    /// Starts this program again, whose test `unanswering_process` has to call [`run_if_asked`].
    pub fn start(file: &Path, kind: Kind) -> Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(["--exact", "unanswering_process", "--nocapture", "--test-threads=1"])
            .env(FILE, file)
            .env(KIND, format!("{kind:?}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = BufReader::new(process.stdout.take().context("it has no output")?);
        let told = output.lines().find_map(|line| Some(line.ok()?.split_once(READY)?.1.parse::<u64>().ok()));
        let mapped_at = told.flatten().context("the process has ended")?;
        Ok(Unanswering { process, mapped_at, reader: None })
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Has its memory held by somebody who reads the silent file, and waits until nobody else can read any of it.
    pub fn hold(&mut self) -> Result<()> {
        let memory = File::open(format!("/proc/{}/mem", self.pid()))?;
        let at = self.mapped_at;
        self.reader = Some(thread::spawn(move || {
            let _ = memory.read_exact_at(&mut [0; 8], at);
        }));
        // It holds the lock within microseconds.
        thread::sleep(Duration::from_millis(100));
        writeln!(self.process.stdin.as_mut().context("it has no input")?)?;
        let deadline = Instant::now() + Duration::from_secs(10);
        while !self.is_changer_waiting()? {
            ensure!(Instant::now() < deadline, "its memory is not held: {:?}", self.process.try_wait());
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    fn is_changer_waiting(&self) -> Result<bool> {
        for entry in fs::read_dir(format!("/proc/{}/task", self.pid()))? {
            let stat = fs::read_to_string(entry?.path().join("stat"))?;
            if stat.contains(&format!("({CHANGER}) D ")) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl Drop for Unanswering {
    fn drop(&mut self) {
        // Without waiting: it ends when its file does.
        let _ = self.process.kill();
    }
}

/// Does as asked in the environment, for ever.
pub fn run_if_asked() -> Result<()> {
    let Ok(kind) = std::env::var(KIND) else { return Ok(()) };
    let file = OpenOptions::new().read(true).write(true).open(std::env::var(FILE)?)?;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let at = unsafe {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        mmap(std::ptr::null_mut(), LENGTH, protection, MapFlags::PRIVATE, &file, 0)? as u64
    };
    if kind == format!("{:?}", Kind::Stack) {
        thread::Builder::new().name(SLEEPER.to_owned()).spawn(move || sleep_with_stack_at(at + LENGTH as u64 / 2))?;
    } else {
        thread::Builder::new().name(SLEEPER.to_owned()).spawn(|| {
            loop {
                thread::sleep(Duration::from_secs(1000));
            }
        })?;
    }
    // A new thread would itself change the memory.
    thread::Builder::new().name(CHANGER.to_owned()).spawn(move || {
        let _ = std::io::stdin().read_line(&mut String::new());
        // SAFETY: the mapping above, of which nobody has a reference.
        let _ = unsafe { munmap(at as *mut _, LENGTH) };
    })?;
    println!("{READY}{at}");
    loop {
        thread::park();
    }
}

/// pause(2), with nothing of the stack in use.
fn sleep_with_stack_at(at: u64) {
    // SAFETY: the stack pointer is not used while it is elsewhere, as a system call does not touch the stack, and pause
    // does not return: the thread has no handlers of signals.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!(
            "mov rsp, {at}",
            "2: mov eax, 34",
            "syscall",
            "jmp 2b",
            at = in(reg) at,
            options(noreturn)
        )
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
