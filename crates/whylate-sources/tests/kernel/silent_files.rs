// SPDX-License-Identifier: MIT OR Apache-2.0
//! A FUSE file system that stops answering on request, as a network file system does without its server: a thread that
//! reads an uncached page of its files blocks, and so does a thread that waits for a lock that the first one holds.
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

/// FUSE opcodes (include/uapi/linux/fuse.h).
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

/// Size of a request's header, and of the largest request.
const HEADER_BYTES: usize = 40;
const REQUEST_BYTES: usize = 1 << 20;

/// Mounted until it is dropped, which fails pending requests.
pub struct SilentFiles {
    directory: tempfile::TempDir,
    is_silent: Arc<AtomicBool>,
    has_ended: Arc<AtomicBool>,
    server: Option<JoinHandle<()>>,
}

impl SilentFiles {
    /// Mounts files by name. Returns `None` if this kernel has no FUSE, or if this process may not mount it.
    pub fn mount(files: BTreeMap<String, Vec<u8>>) -> Result<Option<Self>> {
        let Ok(device) = OpenOptions::new().read(true).write(true).open("/dev/fuse") else { return Ok(None) };
        let directory = tempfile::tempdir()?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let options = std::ffi::CString::new(options)?;
        if mount("whylate-test", directory.path(), "fuse", MountFlags::NOSUID, options.as_c_str()).is_err() {
            return Ok(None);
        }
        let is_silent = Arc::new(AtomicBool::new(false));
        let has_ended = Arc::new(AtomicBool::new(false));
        let server = Server { files: files.into_iter().collect(), device, is_silent: Arc::clone(&is_silent) };
        let ended_there = Arc::clone(&has_ended);
        let server = thread::spawn(move || server.answer_until(&ended_there));
        Ok(Some(SilentFiles { directory, is_silent, has_ended, server: Some(server) }))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Stops answering requests.
    pub fn be_silent(&self) {
        self.is_silent.store(true, Ordering::SeqCst);
    }
}

impl Drop for SilentFiles {
    fn drop(&mut self) {
        // The server closes the device, which fails all pending requests.
        self.has_ended.store(true, Ordering::SeqCst);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
        let _ = unmount(self.directory.path(), UnmountFlags::DETACH);
    }
}

struct Server {
    /// The first has node 2, as node 1 is the root directory.
    files: Vec<(String, Vec<u8>)>,
    device: File,
    is_silent: Arc<AtomicBool>,
}

impl Server {
    fn answer_until(mut self, has_ended: &AtomicBool) {
        let mut request = vec![0; REQUEST_BYTES];
        while !has_ended.load(Ordering::SeqCst) {
            let timeout = Timespec::try_from(Duration::from_millis(20)).ok();
            let is_asked = poll(&mut [PollFd::new(&self.device, PollFlags::IN)], timeout.as_ref());
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

    /// Returns the answer, or `None` for a request that expects none.
    fn answer(&self, request: &[u8]) -> Option<Vec<u8>> {
        let int = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().expect("four"));
        let long = |at: usize| u64::from_ne_bytes(request[at..at + 8].try_into().expect("eight"));
        let (operation, node, body) = (int(4), long(16), HEADER_BYTES);
        let answer: Result<Vec<u8>, i32> = match operation {
            FORGET | BATCH_FORGET | INTERRUPT => return None,
            INIT => Ok(init_body()),
            LOOKUP => {
                let name = request[body..].split(|&byte| byte == 0).next().unwrap_or_default();
                let place = self.files.iter().position(|(known, _)| known.as_bytes() == name);
                place.map(|place| self.entry(place as u64 + 2)).ok_or(libc::ENOENT)
            }
            // Valid for a second.
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
        let (error, body) = answer.map_or_else(|error| (-error, Vec::new()), |body| (0, body));
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

/// Returns the body of FUSE_INIT's answer, with a read-ahead that keeps unread pages out of the cache.
fn init_body() -> Vec<u8> {
    let mut body = vec![0; 64];
    body[0..4].copy_from_slice(&7_u32.to_ne_bytes());
    body[4..8].copy_from_slice(&31_u32.to_ne_bytes());
    body[20..24].copy_from_slice(&(128_u32 << 10).to_ne_bytes());
    body[24..28].copy_from_slice(&1_u32.to_ne_bytes());
    body
}

/// Bytes of a mapped file.
pub const LENGTH: usize = 4096;

/// Name of the thread that sleeps in an unresponsive process.
pub const SLEEPER: &str = "in silence";
/// Name of the thread that waits to change its process's address space.
const CHANGER: &str = "changes memory";

const FILE: &str = "WHYLATE_SILENT_FILE";
const KIND: &str = "WHYLATE_SILENT_KIND";
const READY: &str = "mapped at ";

/// What does not respond in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The stack of a thread is in a silent file.
    Stack,
    /// A reader holds its mmap lock forever, and a thread of its own waits for the write lock: no other reader gets it.
    Memory,
}

/// A process with memory that cannot be read once its file is silent. Killed on drop.
pub struct Unanswering {
    process: Child,
    mapped_at: u64,
    reader: Option<JoinHandle<()>>,
}

impl Unanswering {
    /// Starts this test program again; its test `unanswering_process` has to call [`run_if_asked`].
    pub fn start(file: &Path, kind: Kind) -> Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(["--exact", "unanswering_process", "--nocapture", "--test-threads=1"])
            .env(FILE, file)
            .env(KIND, format!("{kind:?}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = BufReader::new(process.stdout.take().context("it has no output")?);
        let address = output.lines().find_map(|line| Some(line.ok()?.split_once(READY)?.1.parse::<u64>().ok()));
        let mapped_at = address.flatten().context("the process has ended")?;
        Ok(Unanswering { process, mapped_at, reader: None })
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Has a thread hold the mmap lock by reading the silent file, and waits until a writer waits for the lock.
    pub fn hold(&mut self) -> Result<()> {
        let memory = File::open(format!("/proc/{}/mem", self.pid()))?;
        let at = self.mapped_at;
        self.reader = Some(thread::spawn(move || {
            let _ = memory.read_exact_at(&mut [0; 8], at);
        }));
        // The reader takes the lock within microseconds.
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
        // Without waiting: the process ends when its file does.
        let _ = self.process.kill();
    }
}

/// Blocks forever as the environment asks, or returns at once if it does not.
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
    // Creating a thread later would itself need the mmap lock.
    thread::Builder::new().name(CHANGER.to_owned()).spawn(move || {
        let _ = std::io::stdin().read_line(&mut String::new());
        // SAFETY: the mapping above, to which no reference exists.
        let _ = unsafe { munmap(at as *mut _, LENGTH) };
    })?;
    println!("{READY}{at}");
    loop {
        thread::park();
    }
}

/// Calls pause(2) with the stack pointer in the mapped file.
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
