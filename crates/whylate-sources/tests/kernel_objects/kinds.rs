// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that wait for an object of each kind, whose other end a child process has.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::Read as _;
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::ptr::null_mut;
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{CWD, FileType, FlockOperation, Mode, OFlags, flock, mknodat, open};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime};
use whylate_model::object::{Object, ObjectKind};

use super::{Holder, any};

/// What has to be found of a thread.
pub struct Expected {
    /// Kind of its object; `None` for a file lock.
    pub kind: Option<ObjectKind>,
    pub path: Option<String>,
    /// The process that could end the wait.
    pub peer: Option<String>,
    /// State of that process; `None` for that of all holders.
    pub state: Option<&'static str>,
    pub is_so: fn(&Object) -> bool,
}

/// The threads, and the processes that have the other ends.
pub struct Waits {
    pub expected: Vec<(String, Expected)>,
    pub holders: Vec<Holder>,
    /// Children that a thread waits for.
    children: Vec<Pid>,
    directory: tempfile::TempDir,
    fuse: Option<PathBuf>,
    queues: Vec<i32>,
    semaphores: Vec<i32>,
}

impl Drop for Waits {
    fn drop(&mut self) {
        // The connection ends with the process that has it.
        self.holders.clear();
        for &child in &self.children {
            let _ = kill_process(child, Signal::KILL);
        }
        if let Some(point) = &self.fuse {
            let _ = unmount(point, UnmountFlags::DETACH);
        }
        for &queue in &self.queues {
            // SAFETY: the queue is that of this test; no memory is passed.
            unsafe { libc::msgctl(queue, libc::IPC_RMID, null_mut()) };
        }
        for &set in &self.semaphores {
            // SAFETY: the set is that of this test; no memory is passed.
            unsafe { libc::semctl(set, 0, libc::IPC_RMID) };
        }
    }
}

fn expect(kind: ObjectKind) -> Expected {
    Expected { kind: Some(kind), path: None, peer: None, state: None, is_so: any }
}

/// Starts a thread with this name, which waits as long as the process lives.
fn spawn(name: &str, wait: impl FnOnce() + Send + 'static) -> Result<()> {
    thread::Builder::new().name(name.to_owned()).spawn(wait)?;
    Ok(())
}

/// Reads from a descriptor for ever.
fn read(mut file: File) {
    let mut bytes = [0; 128];
    let _ = file.read(&mut bytes);
    thread::sleep(Duration::MAX);
}

fn owned(descriptor: RawFd) -> Result<OwnedFd> {
    ensure!(descriptor >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: a descriptor that was just created.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

fn pipe() -> Result<(File, OwnedFd)> {
    let (reader, writer) = std::io::pipe()?;
    Ok((File::from(OwnedFd::from(reader)), writer.into()))
}

impl Waits {
    pub fn start() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let (expected, holders, children) = Default::default();
        let (queues, semaphores) = Default::default();
        let mut waits = Waits { expected, holders, children, directory, fuse: None, queues, semaphores };
        waits.pipes()?;
        waits.unix_sockets()?;
        waits.inet_sockets()?;
        waits.mutexes()?;
        waits.anonymous()?;
        waits.locks()?;
        waits.queues()?;
        waits.others()?;
        waits.fuse()?;
        Ok(waits)
    }

    /// Starts a process that has this descriptor, and returns its name.
    fn hold(&mut self, descriptor: impl Into<OwnedFd>) -> Result<String> {
        let mut command = Command::new("sleep");
        command.arg("1000").stdin(Stdio::from(descriptor.into())).stdout(Stdio::null()).stderr(Stdio::null());
        self.holders.push(Holder(command.spawn()?));
        let holder = &self.holders[self.holders.len() - 1];
        Ok(holder.name())
    }

    fn path(&self, name: &str) -> Result<PathBuf> {
        Ok(fs::canonicalize(self.directory.path())?.join(name))
    }

    fn add(&mut self, name: &str, expected: Expected, wait: impl FnOnce() + Send + 'static) -> Result<()> {
        spawn(name, wait)?;
        self.expected.push((name.to_owned(), expected));
        Ok(())
    }

    fn pipes(&mut self) -> Result<()> {
        let (reader, writer) = pipe()?;
        let peer = Some(self.hold(writer)?);
        self.add("pipe", Expected { peer, ..expect(ObjectKind::Pipe) }, || read(reader))?;

        let path = self.path("fifo")?;
        mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0)?;
        let both = open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let reader = File::from(open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?);
        let peer = Some(self.hold(open(&path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?)?);
        drop(both);
        let path = path.to_str().map(str::to_owned);
        self.add("fifo", Expected { path, peer, ..expect(ObjectKind::Fifo) }, || read(reader))?;

        let unopened = self.path("unopened")?;
        mknodat(CWD, &unopened, FileType::Fifo, Mode::RWXU, 0)?;
        let path = unopened.to_str().map(str::to_owned);
        self.add("fifo open", Expected { path, ..expect(ObjectKind::Fifo) }, move || {
            let _ = File::open(unopened);
        })?;

        let (reader, writer) = pipe()?;
        let peer = Some(self.hold(writer)?);
        let has_timeout = |object: &Object| object.timeout_ns == Some(900_000_000_000);
        let expected = Expected { peer, is_so: has_timeout, ..expect(ObjectKind::Pipe) };
        self.add("poll", expected, move || {
            let timeout = Timespec { tv_sec: 900, tv_nsec: 0 };
            let _ = poll(&mut [PollFd::new(&reader, PollFlags::IN)], Some(&timeout));
        })?;

        let (reader, writer) = pipe()?;
        let peer = Some(self.hold(writer)?);
        let event = eventfd(0, EventfdFlags::CLOEXEC)?;
        self.add("poll several", Expected { peer, ..expect(ObjectKind::Pipe) }, move || {
            let mut both = [PollFd::new(&event, PollFlags::IN), PollFd::new(&reader, PollFlags::IN)];
            let _ = poll(&mut both, None);
        })
    }

    fn unix_sockets(&mut self) -> Result<()> {
        let (client, server) = UnixStream::pair()?;
        let peer = Some(self.hold(server)?);
        self.add("unix pair", Expected { peer, ..expect(ObjectKind::UnixSocket) }, || {
            read(OwnedFd::from(client).into())
        })?;

        let path = self.path("socket")?;
        let listener = UnixListener::bind(&path)?;
        let client = UnixStream::connect(&path)?;
        let peer = Some(self.hold(listener.accept()?.0)?);
        drop(listener);
        let path = path.to_str().map(str::to_owned);
        let expected = Expected { path, peer, ..expect(ObjectKind::UnixSocket) };
        self.add("unix", expected, || read(OwnedFd::from(client).into()))?;

        let path = self.path("queued")?;
        let listener = UnixListener::bind(&path)?;
        let client = UnixStream::connect(&path)?;
        let peer = Some(self.hold(listener)?);
        let path = path.to_str().map(str::to_owned);
        let expected = Expected { path, peer, ..expect(ObjectKind::UnixSocket) };
        self.add("unix queued", expected, || read(OwnedFd::from(client).into()))?;

        // SAFETY: no memory is passed.
        let listener = owned(unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) })?;
        let path = self.path("full")?;
        rustix::net::bind(&listener, &rustix::net::SocketAddrUnix::new(&path)?)?;
        rustix::net::listen(&listener, 0)?;
        let first = UnixStream::connect(&path)?;
        let peer = Some(self.hold(listener)?);
        let name = path.to_str().map(str::to_owned);
        self.add("unix full", Expected { path: name, peer, ..expect(ObjectKind::UnixSocket) }, move || {
            let second = UnixStream::connect(&path);
            drop((first, second));
        })
    }

    fn inet_sockets(&mut self) -> Result<()> {
        let is_established = |object: &Object| object.state.as_deref() == Some("established");
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let client = TcpStream::connect(listener.local_addr()?)?;
        let peer = Some(self.hold(listener.accept()?.0)?);
        drop(listener);
        let expected = Expected { peer, is_so: is_established, ..expect(ObjectKind::Tcp) };
        self.add("tcp", expected, || read(OwnedFd::from(client).into()))?;

        let listener = TcpListener::bind("127.0.0.1:0")?;
        let client = TcpStream::connect(listener.local_addr()?)?;
        let peer = Some(self.hold(listener)?);
        let expected = Expected { peer, is_so: is_established, ..expect(ObjectKind::Tcp) };
        self.add("tcp queued", expected, || read(OwnedFd::from(client).into()))?;

        let server = UdpSocket::bind("127.0.0.1:0")?;
        let client = UdpSocket::bind("127.0.0.1:0")?;
        client.connect(server.local_addr()?)?;
        let peer = Some(self.hold(server)?);
        self.add("udp", Expected { peer, ..expect(ObjectKind::Udp) }, || read(OwnedFd::from(client).into()))
    }

    fn mutexes(&mut self) -> Result<()> {
        struct Shared(MaybeUninit<libc::pthread_mutex_t>, MaybeUninit<libc::pthread_cond_t>);
        // SAFETY: both are made for use by several threads, at an address that does not change.
        unsafe impl Sync for Shared {}
        // SAFETY: as above.
        unsafe impl Send for Shared {}
        fn shared() -> &'static Shared {
            let of_all = Shared(
                MaybeUninit::new(libc::PTHREAD_MUTEX_INITIALIZER),
                MaybeUninit::new(libc::PTHREAD_COND_INITIALIZER),
            );
            Box::leak(Box::new(of_all))
        }
        /// Locks the mutex, and never releases it.
        fn lock(shared: &'static Shared) {
            // SAFETY: the mutex is initialized, and lives for ever.
            unsafe { libc::pthread_mutex_lock(shared.0.as_ptr().cast_mut()) };
        }
        let held = shared();
        let (sender, receiver) = std::sync::mpsc::channel();
        spawn("mutex holder", move || {
            lock(held);
            let _ = sender.send(rustix::thread::gettid().as_raw_nonzero().get());
            thread::sleep(Duration::from_secs(1_000));
        })?;
        let peer = Some(format!("mutex holder:{}", receiver.recv()?));
        let expected = Expected { peer, state: Some("S"), ..expect(ObjectKind::Mutex) };
        self.add("mutex", expected, move || lock(held))?;
        let condition = shared();
        self.add("condition", expect(ObjectKind::Futex), move || {
            lock(condition);
            // SAFETY: both are initialized, and live for ever; this thread has locked the mutex.
            unsafe { libc::pthread_cond_wait(condition.1.as_ptr().cast_mut(), condition.0.as_ptr().cast_mut()) };
        })?;
        let (sender, receiver) = std::sync::mpsc::channel();
        let joined = thread::Builder::new().name("joined".to_owned()).spawn(move || {
            let _ = sender.send(rustix::thread::gettid().as_raw_nonzero().get());
            thread::sleep(Duration::from_secs(1_000));
        })?;
        let peer = Some(format!("joined:{}", receiver.recv()?));
        self.add("join", Expected { peer, state: Some("S"), ..expect(ObjectKind::Thread) }, || drop(joined.join()))
    }

    fn anonymous(&mut self) -> Result<()> {
        let event = File::from(eventfd(0, EventfdFlags::CLOEXEC)?);
        self.add("eventfd", expect(ObjectKind::Eventfd), || read(event))?;

        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)?;
        let [none, later] = [0, 900].map(|tv_sec| Timespec { tv_sec, tv_nsec: 0 });
        timerfd_settime(&timer, TimerfdTimerFlags::empty(), &Itimerspec { it_interval: none, it_value: later })?;
        let expires = |object: &Object| object.expires_in_ns.is_some_and(|ns| (1..=900_000_000_000).contains(&ns));
        let expected = Expected { is_so: expires, ..expect(ObjectKind::Timerfd) };
        self.add("timerfd", expected, || read(File::from(timer)))?;

        // SAFETY: no memory is passed.
        let epoll = owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        self.add("epoll", expect(ObjectKind::Epoll), move || {
            let mut events = [libc::epoll_event { events: 0, u64: 0 }];
            // SAFETY: there is room for one event.
            unsafe { libc::epoll_wait(epoll.as_raw_fd(), events.as_mut_ptr(), 1, -1) };
        })?;

        // SAFETY: no memory is passed.
        let watches = owned(unsafe { libc::inotify_init1(libc::IN_CLOEXEC) })?;
        self.add("inotify", expect(ObjectKind::Inotify), || read(watches.into()))?;

        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: the set is initialized by the first call.
        let signals = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), libc::SIGUSR2);
            libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC)
        };
        let signals = owned(signals)?;
        self.add("signalfd", expect(ObjectKind::Signalfd), || read(signals.into()))?;

        match io_uring::IoUring::new(2) {
            Ok(ring) => self.add("io_uring", expect(ObjectKind::IoUring), move || drop(ring.submit_and_wait(1)))?,
            Err(error) => println!("io_uring is not tried: {error}"),
        }
        Ok(())
    }

    fn locks(&mut self) -> Result<()> {
        let path = self.path("flocked")?;
        let file = File::create(&path)?;
        flock(&file, FlockOperation::LockExclusive)?;
        let peer = Some(self.hold(file)?);
        let other = File::open(&path)?;
        let path = path.to_str().map(str::to_owned);
        let lock = |path, peer| Expected { kind: None, path, peer, state: None, is_so: any };
        self.add("flock", lock(path, peer), move || {
            let _ = flock(&other, FlockOperation::LockExclusive);
        })
    }

    fn queues(&mut self) -> Result<()> {
        let name = CString::new(format!("/whylate-{}", std::process::id()))?;
        let (flags, mode) = (libc::O_RDONLY | libc::O_CREAT | libc::O_CLOEXEC, 0o600);
        // SAFETY: the name ends in a zero byte; without attributes, those of the system are used.
        let queue = unsafe { libc::mq_open(name.as_ptr(), flags, mode, null_mut::<libc::mq_attr>()) };
        match owned(queue) {
            Err(error) => println!("POSIX message queues are not tried: {error}"),
            Ok(queue) => {
                // SAFETY: the name ends in a zero byte.
                unsafe { libc::mq_unlink(name.as_ptr()) };
                let path = Some(name.to_str()?.to_owned());
                self.add("mq", Expected { path, ..expect(ObjectKind::MessageQueue) }, move || {
                    let mut bytes = vec![0_u8; 64 << 10];
                    // SAFETY: there is room for that number of bytes.
                    unsafe { libc::mq_receive(queue.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), null_mut()) };
                })?;
            }
        }
        // SAFETY: no memory is passed.
        let (queue, set) =
            unsafe { (libc::msgget(libc::IPC_PRIVATE, 0o600), libc::semget(libc::IPC_PRIVATE, 1, 0o600)) };
        ensure!(queue >= 0 && set >= 0, "{}", std::io::Error::last_os_error());
        self.queues.push(queue);
        self.semaphores.push(set);
        let has_id = |object: &Object| object.id.is_some();
        self.add("msgrcv", Expected { is_so: has_id, ..expect(ObjectKind::MessageQueue) }, move || {
            let mut message = [0_u64; 16];
            // SAFETY: there is room for a type and a message of 64 bytes.
            unsafe { libc::msgrcv(queue, message.as_mut_ptr().cast(), 64, 0, 0) };
        })?;
        self.add("semop", Expected { is_so: has_id, ..expect(ObjectKind::Semaphore) }, move || {
            let mut operation = libc::sembuf { sem_num: 0, sem_op: -1, sem_flg: 0 };
            // SAFETY: one operation is passed.
            unsafe { libc::semop(set, &raw mut operation, 1) };
        })
    }

    fn others(&mut self) -> Result<()> {
        let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&controller)?;
        unlockpt(&controller)?;
        let path = ptsname(&controller, Vec::new())?.into_string()?;
        let terminal = File::from(open(&*path, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())?);
        self.add("tty", Expected { path: Some(path), ..expect(ObjectKind::Terminal) }, move || {
            let _open = controller;
            read(terminal);
        })?;

        let mut child = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn()?;
        self.children.push(Pid::from_child(&child));
        let peer = Some(format!("sleep:{}", child.id()));
        self.add("child", Expected { peer, state: Some("S"), ..expect(ObjectKind::Process) }, move || {
            let _ = child.wait();
        })
    }

    /// Mounts a FUSE file system whose daemon never answers.
    fn fuse(&mut self) -> Result<()> {
        let Ok(device) = open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) else {
            println!("FUSE is not tried: /dev/fuse cannot be opened");
            return Ok(());
        };
        let point = self.path("mounted")?;
        fs::create_dir(&point)?;
        let data = CString::new(format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_fd().as_raw_fd()))?;
        if let Err(error) = mount("whylate-test", &point, "fuse", MountFlags::empty(), Some(&*data)) {
            println!("FUSE is not tried: {error}");
            return Ok(());
        }
        self.fuse = Some(point.clone());
        let peer = Some(self.hold(device)?);
        let file = point.join("file");
        let path = file.to_str().map(str::to_owned);
        self.add("fuse", Expected { path, peer, ..expect(ObjectKind::Fuse) }, move || {
            let _ = fs::metadata(file);
        })
    }
}
