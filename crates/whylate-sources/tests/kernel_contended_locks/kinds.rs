// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that contend for kernel locks. A holder copies from a page that is missing until another thread fills it
//! (userfaultfd(2)), or it changes many pages.

mod gave_up;

use std::ffi::c_void;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use whylate_model::object::{Object, ObjectKind};
use whylate_sources::kernel::clock;

use super::CONTENDS;

/// What precedes an answer of the process that reads.
const READ: &str = "read ";
/// Number of kinds, of waits of each, and the time for which a lock is held.
pub const KINDS: usize = 11;
/// Kinds with holders that are on a CPU.
pub const HOLDERS_RUN: [&str; 4] = ["memory", "other memory", "killed", "gave up"];
const ROUNDS: usize = 20;
const KILLED_ROUNDS: usize = 5;
const MAX_KILLED_ATTEMPTS: usize = 40;
/// No further round of a kind starts after this time, but for the first ones.
const MAX_TIME: Duration = Duration::from_secs(6);
const MIN_ROUNDS: usize = 3;
const HELD: Duration = Duration::from_millis(10);

/// A wait that is over.
#[derive(Clone, Debug)]
pub struct Truth {
    pub what: String,
    pub waiter: u32,
    kind: String,
    path: String,
    process: String,
    /// The thread that held the lock last, and those that held it earlier, separated by commas.
    holders: String,
    /// Start and end (CLOCK_MONOTONIC).
    pub from_ns: u64,
    pub to_ns: u64,
}

impl Truth {
    pub fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split('\t').map(str::to_owned);
        let mut next = || fields.next();
        Some(Truth {
            what: next()?,
            waiter: next()?.parse().ok()?,
            kind: next()?,
            path: next()?,
            process: next()?,
            holders: next()?,
            from_ns: next()?.parse().ok()?,
            to_ns: next()?.parse().ok()?,
        })
    }

    /// Returns whether the file has no name any more.
    fn is_deleted(&self) -> bool {
        self.what == "deleted"
    }

    /// Returns whether the object has this kind.
    fn is_of_kind(&self, object: &Object) -> bool {
        serde_json::to_value(object.kind).ok().as_ref().and_then(|kind| kind.as_str()) == Some(&self.kind)
    }

    /// Returns whether the object is this lock, but has no holder: the lock was just passed on when the wait began, or readers
    /// held it, and the waker is no holder. Without CONFIG_MEMCG, the memory map of another process is not known to be one.
    pub fn is_without_holder(&self, object: &Object) -> bool {
        let is_nameless = self.what == "other memory" && object.kind == ObjectKind::KernelLock && !has_memory_owners();
        is_nameless || self.is_of_kind(object) && self.has_name_of(object) && object.peers.is_empty()
    }

    /// Returns whether the object says something that is not true: of this kind, another name or holder; and a named lock of
    /// another kind. Each thread may wait for its process's memory, and for a lock without a name.
    pub fn is_wrong(&self, object: &Object) -> bool {
        if !self.is_of_kind(object) {
            return object.process.is_some() || !matches!(object.kind, ObjectKind::MemoryLock | ObjectKind::KernelLock);
        }
        let differs = |of: &Option<String>, truth: &str| of.as_ref().is_some_and(|of| of != truth);
        differs(&object.path, &self.path)
            || object.path.is_some() && object.is_deleted != self.is_deleted()
            || differs(&object.process, &self.process)
            || !object.peers.is_empty() && !self.has_holders_of(object)
    }

    /// Returns whether the object has the right name, and the right holders.
    pub fn is_true(&self, object: &Object) -> bool {
        self.is_of_kind(object) && self.has_name_of(object) && self.has_holders_of(object)
    }

    fn has_name_of(&self, object: &Object) -> bool {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let is_path = text(&object.path) == self.path && object.is_deleted == self.is_deleted();
        is_path && text(&object.process) == self.process
    }

    /// Returns whether the object's first holder is the last one, and all of them held the lock.
    fn has_holders_of(&self, object: &Object) -> bool {
        let holders: Vec<&str> = self.holders.split(',').collect();
        let mut peers: Vec<&str> = object.peers.iter().map(|peer| peer.process.who.as_str()).collect();
        // The recorder's own thread, which reads objects, may take the lock in between.
        peers.retain(|peer| !peer.starts_with("whylate-waits:"));
        peers.first() == holders.first() && peers.iter().all(|peer| holders.contains(peer))
    }
}

/// Returns whether memory maps have owners (CONFIG_MEMCG).
fn has_memory_owners() -> bool {
    fs::read_to_string("/proc/cgroups").is_ok_and(|text| text.lines().any(|line| line.starts_with("memory\t")))
}

impl fmt::Display for Truth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Truth { what, waiter, kind, path, process, holders, from_ns, to_ns } = self;
        write!(f, "{what}\t{waiter}\t{kind}\t{path}\t{process}\t{holders}\t{from_ns}\t{to_ns}")
    }
}

/// A page that is missing until it is filled.
struct MissingPage {
    page: usize,
    faults: File,
}

const PAGE: usize = 4096;

impl MissingPage {
    fn new() -> Result<Self> {
        /// `UFFDIO_API` and `UFFDIO_REGISTER` (include/uapi/linux/userfaultfd.h).
        const API: libc::c_ulong = 0xc018_aa3f;
        const REGISTER: libc::c_ulong = 0xc020_aa00;
        let page = map(PAGE)?;
        let mut api = [0xaa_u64, 0, 0];
        let mut registered = [page as u64, PAGE as u64, 1, 0];
        // SAFETY: the descriptor is new; the arrays are laid out as the kernel's structures, and outlive the calls.
        let faults = unsafe {
            let faults = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) as i32;
            ensure!(faults >= 0, "no userfaultfd: {}", std::io::Error::last_os_error());
            let faults = <File as std::os::fd::FromRawFd>::from_raw_fd(faults);
            ensure!(libc::ioctl(faults.as_raw_fd(), API, api.as_mut_ptr()) == 0, "another userfaultfd");
            ensure!(libc::ioctl(faults.as_raw_fd(), REGISTER, registered.as_mut_ptr()) == 0, "the page is not taken");
            faults
        };
        Ok(MissingPage { page, faults })
    }

    /// Waits until a thread needs the page.
    fn wait(&self) -> Result<()> {
        let mut message = [0_u8; 32];
        std::io::Read::read_exact(&mut &self.faults, &mut message)?;
        Ok(())
    }

    /// Lets that thread go on.
    fn fill(&self) -> Result<()> {
        /// `UFFDIO_ZEROPAGE`
        const ZEROPAGE: libc::c_ulong = 0xc020_aa04;
        let mut range = [self.page as u64, PAGE as u64, 0, 0];
        // SAFETY: the array is laid out as the kernel's structure, and outlives the call.
        let outcome = unsafe { libc::ioctl(self.faults.as_raw_fd(), ZEROPAGE, range.as_mut_ptr()) };
        ensure!(outcome == 0, "the page is not filled: {}", std::io::Error::last_os_error());
        Ok(())
    }

    /// Writes a byte of the page.
    fn write_to(&self, file: &File) {
        // SAFETY: the page is mapped; nothing else uses it.
        unsafe { libc::write(file.as_raw_fd(), self.page as *const c_void, 1) };
    }
}

impl Drop for MissingPage {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no thread uses it any more.
        unsafe { libc::munmap(self.page as *mut c_void, PAGE) };
    }
}

fn map(bytes: usize) -> Result<usize> {
    // SAFETY: a new mapping at an address that the kernel chooses.
    let memory = unsafe {
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, kind, -1, 0)
    };
    ensure!(memory != libc::MAP_FAILED, "no memory");
    Ok(memory as usize)
}

/// Returns the numbers of the rounds of one kind: fewer on a busy machine.
fn rounds() -> impl Iterator<Item = usize> {
    let began = Instant::now();
    (0..ROUNDS).take_while(move |&round| round < MIN_ROUNDS || began.elapsed() < MAX_TIME)
}

type Job = Box<dyn FnOnce() + Send>;
/// Start and end of a job (CLOCK_MONOTONIC).
type Span = (u64, u64);

/// A thread with a name that runs jobs.
struct Actor {
    name: &'static str,
    tid: u32,
    jobs: Sender<Job>,
    done: Receiver<Span>,
}

impl Actor {
    fn start(name: &'static str) -> Result<Self> {
        let (jobs, to_do) = channel::<Job>();
        let (ends, done) = channel();
        let (sender, tid) = channel();
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            let _ = sender.send(rustix::thread::gettid().as_raw_nonzero().get() as u32);
            for job in to_do {
                let from_ns = clock::monotonic_ns();
                job();
                let _ = ends.send((from_ns, clock::monotonic_ns()));
            }
        })?;
        Ok(Actor { name, tid: tid.recv()?, jobs, done })
    }

    fn begin(&self, job: impl FnOnce() + Send + 'static) -> Result<()> {
        self.jobs.send(Box::new(job)).ok().context("the thread has ended")
    }

    fn wait_until_blocked(&self) -> Result<()> {
        wait_until_blocked(&format!("/proc/self/task/{}/stat", self.tid), MAX_TIME).with_context(|| self.name)
    }

    fn end(&self) -> Result<Span> {
        Ok(self.done.recv()?)
    }

    fn label(&self) -> String {
        format!("{}:{}", self.name, self.tid)
    }
}

/// Waits until the thread of this `stat` file sleeps uninterruptibly, as in no other wait of its own.
fn wait_until_blocked(stat: &str, time: Duration) -> Result<()> {
    let began = Instant::now();
    while began.elapsed() < time {
        let stat = fs::read_to_string(stat)?;
        if stat.rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with('D')) {
            return Ok(());
        }
        thread::sleep(Duration::from_micros(200));
    }
    bail!("it does not wait for the lock")
}

/// Lets a thread hold a lock by `hold`, with the page that it needs, and others wait for it. Returns the time of each wait.
fn contend_for(
    holder: &Actor,
    hold: impl FnOnce(&MissingPage) + Send + 'static,
    waiters: Vec<(&Actor, Job)>,
) -> Result<Vec<Span>> {
    let page = std::sync::Arc::new(MissingPage::new()?);
    let theirs = std::sync::Arc::clone(&page);
    holder.begin(move || hold(&theirs))?;
    page.wait()?;
    let (actors, jobs): (Vec<&Actor>, Vec<Job>) = waiters.into_iter().unzip();
    for (actor, job) in actors.iter().zip(jobs) {
        actor.begin(job)?;
        // They wait in this order.
        actor.wait_until_blocked()?;
    }
    thread::sleep(HELD);
    page.fill()?;
    holder.end()?;
    actors.iter().map(|actor| actor.end()).collect()
}

fn new_truth(what: &str, waiter: &Actor, kind: &str, path: &Path, holders: &str, (from_ns, to_ns): Span) -> Truth {
    Truth {
        what: what.to_owned(),
        waiter: waiter.tid,
        kind: kind.to_owned(),
        path: path.to_string_lossy().into_owned(),
        process: String::new(),
        holders: holders.to_owned(),
        from_ns,
        to_ns,
    }
}

/// The mutex of a pipe, which a writer holds while it copies.
fn pipes(truths: &mut Vec<Truth>) -> Result<()> {
    let (holder, waiter) = (Actor::start("pipe holder")?, Actor::start("pipe waiter")?);
    for _ in rounds() {
        let (_reader, writer) = std::io::pipe()?;
        let writer = File::from(std::os::fd::OwnedFd::from(writer));
        let mut other = writer.try_clone()?;
        let wait: Job = Box::new(move || drop(other.write_all(b"x")));
        let spans = contend_for(&holder, move |page| page.write_to(&writer), vec![(&waiter, wait)])?;
        truths.push(new_truth("pipe", &waiter, "pipe_lock", Path::new(""), &holder.label(), spans[0]));
    }
    Ok(())
}

fn file_at(path: &Path) -> Result<File> {
    Ok(OpenOptions::new().write(true).create(true).truncate(true).open(path)?)
}

/// The lock of an inode, which a writer holds while it copies.
fn inodes(root: &Path, truths: &mut Vec<Truth>) -> Result<()> {
    let (holder, waiter) = (Actor::start("inode holder")?, Actor::start("inode waiter")?);
    for round in rounds() {
        let path = root.join(format!("inode {round}"));
        let (file, mut other) = (file_at(&path)?, file_at(&path)?);
        let wait: Job = Box::new(move || drop(other.write_all(b"x")));
        let spans = contend_for(&holder, move |page| page.write_to(&file), vec![(&waiter, wait)])?;
        truths.push(new_truth("inode", &waiter, "inode_lock", &path, &holder.label(), spans[0]));
    }
    Ok(())
}

/// The lock of the inode of a file that was deleted while it is open, and of one that has another name, as it was removed.
fn removed_names(root: &Path, truths: &mut Vec<Truth>) -> Result<()> {
    let (holder, waiter) = (Actor::start("name holder")?, Actor::start("name waiter")?);
    for round in rounds() {
        for what in ["deleted", "hard link"] {
            let path = root.join(format!("{what} {round}"));
            let mut other = file_at(&path)?;
            // The file is held open by the name that is removed: otherwise the kernel forgets that name.
            let removed = if what == "deleted" { path.clone() } else { root.join(format!("removed {round}")) };
            if what == "hard link" {
                fs::hard_link(&path, &removed)?;
            }
            let file = file_at(&removed)?;
            fs::remove_file(&removed)?;
            let wait: Job = Box::new(move || drop(other.write_all(b"x")));
            let spans = contend_for(&holder, move |page| page.write_to(&file), vec![(&waiter, wait)])?;
            truths.push(new_truth(what, &waiter, "inode_lock", &path, &holder.label(), spans[0]));
        }
    }
    Ok(())
}

/// The lock of the position of a file that two threads write to.
fn positions(root: &Path, truths: &mut Vec<Truth>) -> Result<()> {
    let (holder, waiter) = (Actor::start("pos holder")?, Actor::start("pos waiter")?);
    for round in rounds() {
        let path = root.join(format!("position {round}"));
        let file = file_at(&path)?;
        let mut other = file.try_clone()?;
        let wait: Job = Box::new(move || drop(other.write_all(b"x")));
        let spans = contend_for(&holder, move |page| page.write_to(&file), vec![(&waiter, wait)])?;
        truths.push(new_truth("position", &waiter, "position_lock", &path, &holder.label(), spans[0]));
    }
    Ok(())
}

/// The lock of an inode with two waiters. The second one waits for the first one too, which holds the lock for as long.
fn queues(root: &Path, truths: &mut Vec<Truth>) -> Result<()> {
    let (holder, next, waiter) =
        (Actor::start("queue holder")?, Actor::start("queue next")?, Actor::start("queue waiter")?);
    for round in rounds() {
        let path = root.join(format!("queue {round}"));
        let (file, other, mut last) = (file_at(&path)?, file_at(&path)?, file_at(&path)?);
        let page = std::sync::Arc::new(MissingPage::new()?);
        let theirs = std::sync::Arc::clone(&page);
        let filler = thread::spawn(move || -> Result<()> {
            page.wait()?;
            thread::sleep(HELD);
            page.fill()
        });
        let wait_and_hold: Job = Box::new(move || theirs.write_to(&other));
        let wait: Job = Box::new(move || drop(last.write_all(b"x")));
        let waiters = vec![(&next, wait_and_hold), (&waiter, wait)];
        let spans = contend_for(&holder, move |page| page.write_to(&file), waiters)?;
        filler.join().expect("no panic")?;
        truths.push(new_truth("queue", &next, "inode_lock", &path, &holder.label(), spans[0]));
        let holders = format!("{},{}", next.label(), holder.label());
        truths.push(new_truth("queue", &waiter, "inode_lock", &path, &holders, spans[1]));
    }
    Ok(())
}

/// The lock of a directory's inode, which a reader of the directory holds while it copies.
fn directories(root: &Path, truths: &mut Vec<Truth>) -> Result<()> {
    let (holder, waiter) = (Actor::start("dir holder")?, Actor::start("dir waiter")?);
    for round in rounds() {
        let path = root.join(format!("directory {round}"));
        fs::create_dir(&path)?;
        let (directory, new) = (File::open(&path)?, path.join("new"));
        let hold = move |page: &MissingPage| {
            // SAFETY: the page is mapped; nothing else uses it.
            unsafe { libc::syscall(libc::SYS_getdents64, directory.as_raw_fd(), page.page, PAGE) };
        };
        let wait: Job = Box::new(move || drop(fs::create_dir(new)));
        let spans = contend_for(&holder, hold, vec![(&waiter, wait)])?;
        truths.push(new_truth("directory", &waiter, "inode_lock", &path, &holder.label(), spans[0]));
    }
    Ok(())
}

/// Memory without pages of its own, whose access takes long to change.
struct Memory {
    at: usize,
    bytes: usize,
}

impl Memory {
    const STEP: usize = 256 << 20;

    /// Maps as much memory as takes this long.
    fn taking(time: Duration) -> Result<Self> {
        const LARGEST: usize = 64 * Memory::STEP;
        let at = map(LARGEST)?;
        // SAFETY: the mapping is ours.
        unsafe { libc::madvise(at as *mut c_void, LARGEST, libc::MADV_NOHUGEPAGE) };
        let mut memory = Memory { at, bytes: 0 };
        while memory.bytes < LARGEST {
            // SAFETY: as above; reading maps the zero page.
            let outcome =
                unsafe { libc::madvise((at + memory.bytes) as *mut c_void, Memory::STEP, libc::MADV_POPULATE_READ) };
            ensure!(outcome == 0, "memory is not populated: {}", std::io::Error::last_os_error());
            memory.bytes += Memory::STEP;
            let began = Instant::now();
            memory.change();
            if began.elapsed() >= time {
                break;
            }
        }
        Ok(memory)
    }

    /// Takes the access away, and gives it back: the first one of the calls takes long, with the lock held.
    fn change(&self) {
        for access in [libc::PROT_NONE, libc::PROT_READ] {
            // SAFETY: the mapping is ours, and no other code reads it.
            unsafe { libc::mprotect(self.at as *mut c_void, self.bytes, access) };
        }
    }
}

/// A process that reads how much memory this one has, whenever it is asked.
struct MemoryReader {
    process: Child,
    ask: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    /// TID of the thread that reads.
    answered_by: u32,
}

impl MemoryReader {
    /// Starts it, and waits until it has answered once.
    fn start() -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--exact", "contending_process", "--nocapture"]).env(CONTENDS, std::process::id().to_string());
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let ask = process.stdin.take().context("an input")?;
        let answers = BufReader::new(process.stdout.take().context("an output")?).lines();
        let mut reader = MemoryReader { process, ask, answers, answered_by: 0 };
        reader.ask()?;
        reader.answered_by = reader.answer()?.0;
        Ok(reader)
    }

    fn ask(&mut self) -> Result<()> {
        Ok(writeln!(self.ask)?)
    }

    /// Returns the thread that has read, and the time.
    fn answer(&mut self) -> Result<(u32, Span)> {
        loop {
            let line = self.answers.next().context("the reader has ended")??;
            let Some(numbers) = line.strip_prefix(READ) else { continue };
            let mut numbers = numbers.split(' ').map(str::parse::<u64>);
            let mut next = || numbers.next().context("a number");
            return Ok((next()??.try_into()?, (next()??, next()??)));
        }
    }

    fn end(mut self) -> Result<()> {
        drop(self.ask);
        self.process.wait()?;
        Ok(())
    }
}

/// The lock of a process's memory map, which one thread holds while it changes many pages. Another thread asks for pages, and
/// another process reads the map.
fn memory(truths: &mut Vec<Truth>) -> Result<()> {
    let holder = Actor::start("map holder")?;
    let waiter = Actor::start("map waiter")?;
    let memory = std::sync::Arc::new(Memory::taking(HELD * 2)?);
    let begin_to_hold = || -> Result<()> {
        let (begins, began) = channel();
        let theirs = std::sync::Arc::clone(&memory);
        holder.begin(move || {
            let _ = begins.send(());
            theirs.change();
        })?;
        began.recv()?;
        thread::sleep(Duration::from_millis(2));
        Ok(())
    };
    let page = map(PAGE)?;
    let pid = std::process::id();
    let process = format!("{}:{pid}", fs::read_to_string("/proc/self/comm")?.trim_end());
    let mut reader = MemoryReader::start()?;
    for _ in rounds() {
        begin_to_hold()?;
        reader.ask()?;
        waiter.begin(move || {
            // SAFETY: the page is mapped, and no other code uses it.
            unsafe { libc::madvise(page as *mut c_void, PAGE, libc::MADV_POPULATE_WRITE) };
        })?;
        let span = waiter.end()?;
        truths.push(new_truth("memory", &waiter, "memory_lock", Path::new(""), &holder.label(), span));
        let (waiter, (from_ns, to_ns)) = reader.answer()?;
        let (what, process) = ("other memory".to_owned(), process.clone());
        truths.push(Truth { waiter, process, from_ns, to_ns, what, ..truths[truths.len() - 1].clone() });
        holder.end()?;
    }
    reader.end()?;
    let mut killed = 0;
    for _ in 0..MAX_KILLED_ATTEMPTS {
        let mut reader = MemoryReader::start()?;
        let waiter = reader.answered_by;
        begin_to_hold()?;
        let from_ns = clock::monotonic_ns();
        reader.ask()?;
        // On a busy machine, it may have read only after the lock was released.
        if wait_until_blocked(&format!("/proc/{waiter}/stat"), HELD).is_err() {
            reader.end()?;
            holder.end()?;
            continue;
        }
        thread::sleep(HELD / 10);
        reader.process.kill()?;
        reader.process.wait()?;
        let to_ns = clock::monotonic_ns();
        let (what, process) = ("killed".to_owned(), process.clone());
        truths.push(Truth { waiter, process, from_ns, to_ns, what, ..truths[truths.len() - 1].clone() });
        holder.end()?;
        killed += 1;
        if killed == KILLED_ROUNDS {
            break;
        }
    }
    gave_up::waiters(&memory, truths)
}

/// Reads how much memory a process has, whenever it is asked.
pub fn read_memory(pid: &str) -> Result<()> {
    for line in std::io::stdin().lines() {
        line?;
        let from_ns = clock::monotonic_ns();
        fs::read(format!("/proc/{pid}/smaps_rollup"))?;
        let tid = rustix::thread::gettid().as_raw_nonzero();
        println!("\n{READ}{tid} {from_ns} {}", clock::monotonic_ns());
    }
    Ok(())
}

/// Takes memory for all that follows at once, so that no thread changes the memory map, and holds its lock, but those that shall.
fn keep_memory_map() {
    const BYTES: i32 = 64 << 20;
    // SAFETY: they set options of the allocator.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 2 * BYTES);
        libc::mallopt(libc::M_TOP_PAD, BYTES);
    }
    drop(vec![1_u8; 1 << 20]);
}

/// Contends for all kinds of locks, one after another. Returns the waits.
pub fn contend() -> Result<Vec<Truth>> {
    keep_memory_map();
    let directory = tempfile::tempdir()?;
    let root = fs::canonicalize(directory.path())?;
    let mut truths = Vec::new();
    pipes(&mut truths)?;
    inodes(&root, &mut truths)?;
    removed_names(&root, &mut truths)?;
    positions(&root, &mut truths)?;
    queues(&root, &mut truths)?;
    directories(&root, &mut truths)?;
    memory(&mut truths)?;
    Ok(truths)
}
