// SPDX-License-Identifier: MIT OR Apache-2.0
//! Threads that wait for an object of each kind, in several rounds. A wait ends when the process with the other end exits.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read as _;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Barrier, mpsc};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FileType, FlockOperation, Mode, OFlags, flock, mknodat, open};
use rustix::process::{Pid, Signal, kill_process};
use whylate_model::path::budget::Budget;

use super::named;

/// Number of rounds, and duration of a wait. On an idle machine, peers are read within 500 ms.
const ROUNDS: u32 = 2;
const ROUNDS_THOROUGH: u32 = 20;
const SECONDS: &str = "1.5";
const TIMEOUT: Duration = Duration::from_millis(1_500);

/// A wait that is over: what it was for, and the process that could end it.
struct Truth {
    kind: &'static str,
    path: Option<String>,
    peer: Option<String>,
}

/// A wait that is prepared: its helper has started.
struct Prepared {
    truth: Truth,
    wait: Box<dyn FnOnce() -> Result<()>>,
}

impl Prepared {
    fn new(truth: Truth, mut peer: Child, wait: impl FnOnce(&mut Child) -> Result<()> + 'static) -> Self {
        let wait = move || {
            wait(&mut peer)?;
            peer.wait()?;
            Ok(())
        };
        Prepared { truth, wait: Box::new(wait) }
    }
}

/// Waits of one kind; called with a new path.
type Kind = (&'static str, fn(PathBuf) -> Result<Prepared>);

const KINDS: [Kind; 10] = [
    ("pipe", pipe),
    ("fifo", fifo),
    ("poll", poll_pipe),
    ("unix", unix),
    ("tcp", tcp),
    ("udp", udp),
    ("flock", file_lock),
    ("posix lock", posix_lock),
    ("child", child),
    ("gave up", gave_up),
];

/// Starts a process that keeps this descriptor open for a while.
fn hold(descriptor: impl Into<OwnedFd>) -> Result<Child> {
    let mut command = Command::new("sleep");
    command.arg(SECONDS).stdin(Stdio::from(descriptor.into())).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(command.spawn()?)
}

fn truth(kind: &'static str, path: Option<PathBuf>, peer: &Child) -> Truth {
    let path = path.and_then(|path| Some(path.to_str()?.to_owned()));
    Truth { kind, path, peer: Some(format!("sleep:{}", peer.id())) }
}

/// Reads until the other end is closed.
fn read(descriptor: impl Into<OwnedFd>) -> Result<()> {
    ensure!(File::from(descriptor.into()).read(&mut [0; 8])? == 0, "the other end wrote");
    Ok(())
}

fn pipe(_: PathBuf) -> Result<Prepared> {
    let (reader, writer) = std::io::pipe()?;
    let peer = hold(writer)?;
    Ok(Prepared::new(truth("pipe", None, &peer), peer, |_| read(reader)))
}

fn fifo(path: PathBuf) -> Result<Prepared> {
    mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0)?;
    let both = open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let reader = open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let peer = hold(open(&path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?)?;
    drop(both);
    Ok(Prepared::new(truth("fifo", Some(path), &peer), peer, |_| read(reader)))
}

fn poll_pipe(_: PathBuf) -> Result<Prepared> {
    let (reader, writer) = std::io::pipe()?;
    let peer = hold(writer)?;
    Ok(Prepared::new(truth("pipe", None, &peer), peer, move |_| {
        poll(&mut [PollFd::new(&reader, PollFlags::IN)], Some(&Timespec { tv_sec: 900, tv_nsec: 0 }))?;
        Ok(())
    }))
}

fn unix(_: PathBuf) -> Result<Prepared> {
    let (client, server) = UnixStream::pair()?;
    let peer = hold(server)?;
    Ok(Prepared::new(truth("unix_socket", None, &peer), peer, |_| read(client)))
}

fn tcp(_: PathBuf) -> Result<Prepared> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let client = TcpStream::connect(listener.local_addr()?)?;
    let peer = hold(listener.accept()?.0)?;
    Ok(Prepared::new(truth("tcp", None, &peer), peer, |_| read(client)))
}

/// Returns a connected socket, and a process that has its other end and never answers.
fn without_answer() -> Result<(UdpSocket, Child)> {
    let (server, client) = (UdpSocket::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?);
    client.connect(server.local_addr()?)?;
    let mut command = Command::new("sleep");
    command.arg("30").stdin(Stdio::from(OwnedFd::from(server))).stdout(Stdio::null());
    Ok((client, command.spawn()?))
}

/// No answer from a process that is busy with something else.
fn udp(_: PathBuf) -> Result<Prepared> {
    let (client, peer) = without_answer()?;
    Ok(Prepared::new(truth("udp", None, &peer), peer, move |peer| {
        client.set_read_timeout(Some(TIMEOUT))?;
        let _ = client.recv(&mut [0; 8]);
        Ok(peer.kill()?)
    }))
}

fn file_lock(path: PathBuf) -> Result<Prepared> {
    let file = File::create(&path)?;
    flock(&file, FlockOperation::LockExclusive)?;
    let peer = hold(file)?;
    let other = File::open(&path)?;
    Ok(Prepared::new(truth("file_lock", Some(path), &peer), peer, move |_| {
        Ok(flock(&other, FlockOperation::LockExclusive)?)
    }))
}

/// A lock that belongs to a process; this one's own locks do not conflict.
fn posix_lock(path: PathBuf) -> Result<Prepared> {
    File::create(&path)?;
    let script = "import fcntl,sys,time; f=open(sys.argv[1],'r+'); fcntl.lockf(f,fcntl.LOCK_EX); print(1,flush=True); \
                  time.sleep(1.6)";
    let mut command = Command::new("python3");
    command.args(["-c", script]).arg(&path).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut peer = command.spawn()?;
    let mut output = peer.stdout.take().context("it has an output")?;
    output.read_exact(&mut [0; 1])?;
    let file = File::options().write(true).open(&path)?;
    let truth = Truth { peer: Some(format!("python3:{}", peer.id())), ..truth("file_lock", Some(path), &peer) };
    Ok(Prepared::new(truth, peer, move |_| {
        rustix::fs::fcntl_lock(&file, FlockOperation::LockExclusive)?;
        // An unbuffered Python writes the end of the line separately, and fails if the pipe is closed.
        drop(output);
        Ok(())
    }))
}

fn child(_: PathBuf) -> Result<Prepared> {
    let peer = Command::new("sleep").arg(SECONDS).stdin(Stdio::null()).spawn()?;
    Ok(Prepared::new(truth("process", None, &peer), peer, |_| Ok(())))
}

/// No answer from a stopped process.
fn gave_up(_: PathBuf) -> Result<Prepared> {
    let (client, peer) = without_answer()?;
    kill_process(Pid::from_child(&peer), Signal::STOP)?;
    Ok(Prepared::new(truth("udp", None, &peer), peer, move |peer| {
        poll(&mut [PollFd::new(&client, PollFlags::IN)], Some(&Timespec::try_from(TIMEOUT)?))?;
        Ok(peer.kill()?)
    }))
}

/// Waits for all kinds at once, and returns a line for each wait. All helpers of a round start before its waits begin: between
/// fork(2) and execve(2) a helper has copies of all descriptors, and is a peer of each wait.
pub fn wait() -> Result<Vec<String>> {
    let rounds = if std::env::var_os("WHYLATE_THOROUGH").is_some() { ROUNDS_THOROUGH } else { ROUNDS };
    let directory = tempfile::tempdir()?;
    let root = fs::canonicalize(directory.path())?;
    let (sender, receiver) = mpsc::channel::<Result<String>>();
    let all_threads = Arc::new(Barrier::new(KINDS.len()));
    for (name, kind) in KINDS {
        let (sender, root, all_threads) = (sender.clone(), root.clone(), Arc::clone(&all_threads));
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            for round in 0..rounds {
                let prepared = kind(root.join(format!("{name} {round}")));
                all_threads.wait();
                let line = prepared.and_then(|Prepared { truth: Truth { kind, path, peer }, wait }| {
                    wait()?;
                    let (path, peer) = (path.unwrap_or_default(), peer.unwrap_or_default());
                    Ok(format!("truth\t{name}\t{kind}\t{path}\t{peer}"))
                });
                all_threads.wait();
                let _ = sender.send(line.with_context(|| name));
            }
            drop(sender);
            // The threads stay until they have been listed.
            thread::sleep(Duration::from_secs(1_000));
        })?;
    }
    drop(sender);
    receiver.into_iter().collect()
}

/// Compares the objects of each thread with what it printed. Returns the kinds of which a wait has its object and its peer.
pub fn check(truths: &[String], budget: &Budget) -> Result<BTreeSet<&'static str>> {
    let mut found: BTreeSet<String> = BTreeSet::new();
    for segment in named(budget) {
        let (Some(waiter), Some(object)) = (&segment.waiter, &segment.object) else { continue };
        let kind = serde_json::to_value(object.kind)?;
        let peer = object.peers.first().map(|peer| peer.process.who.clone()).unwrap_or_default();
        let (name, kind) = (waiter.comm().unwrap_or_default(), kind.as_str().unwrap_or_default());
        // Threads also wait for their helpers to start and to end.
        if !truths.iter().any(|line| line.starts_with(&format!("truth\t{name}\t{kind}\t"))) {
            continue;
        }
        found.insert(format!("truth\t{name}\t{kind}\t{}\t{peer}", object.path.as_deref().unwrap_or_default()));
        if name == "gave up" && kind == "udp" {
            ensure!(segment.gave_up() && (object.peers.is_empty() || object.has_stopped_peer()), "{segment:?}");
            ensure!(object.timeout_ns == u64::try_from(TIMEOUT.as_nanos()).ok(), "{object:?}");
        }
    }
    let truths: BTreeSet<String> = truths.iter().filter(|line| line.starts_with("truth")).cloned().collect();
    // On a busy machine a wait may end before its object or its peers are read, but no wrong one may be named.
    let object = |line: &String| line.rsplit_once('\t').map_or_else(String::new, |(object, _)| object.to_owned());
    let objects = |lines: &BTreeSet<String>| lines.iter().map(object).collect::<BTreeSet<String>>();
    let others: Vec<String> = objects(&found).difference(&objects(&truths)).cloned().collect();
    let wrong: Vec<&String> = found.difference(&truths).filter(|line| !line.ends_with('\t')).collect();
    let of_kind = |name: &str| truths.intersection(&found).any(|line| line.starts_with(&format!("truth\t{name}\t")));
    println!("{} of {} waits have object and peer", truths.intersection(&found).count(), truths.len());
    ensure!(others.is_empty() && wrong.is_empty(), "wrong: {others:#?}, {wrong:#?}");
    Ok(KINDS.iter().map(|(name, _)| *name).filter(|name| of_kind(name)).collect())
}

/// Returns the kinds that are not among these.
pub fn others(seen: &BTreeSet<&str>) -> Vec<&'static str> {
    KINDS.iter().map(|(name, _)| *name).filter(|name| !seen.contains(name)).collect()
}
