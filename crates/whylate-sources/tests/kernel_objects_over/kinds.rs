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
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FileType, FlockOperation, Mode, OFlags, flock, mknodat, open};
use rustix::process::{Pid, Signal, kill_process};
use whylate_model::path::budget::Budget;

use super::named;

/// Number of rounds, and duration of a wait. On an idle machine, peers are read within 500 ms.
const ROUNDS: u32 = 3;
const ROUNDS_THOROUGH: u32 = 20;
const SECONDS: &str = "1.5";
const TIMEOUT: Duration = Duration::from_millis(1_500);

/// A wait that is over: what it was for, and the process that could end it.
struct Truth {
    kind: &'static str,
    path: Option<String>,
    peer: Option<String>,
}

/// Waits of one kind; called with a new path.
type Kind = (&'static str, fn(PathBuf) -> Result<Truth>);

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

fn pipe(_: PathBuf) -> Result<Truth> {
    let (reader, writer) = std::io::pipe()?;
    let mut peer = hold(writer)?;
    read(reader)?;
    peer.wait()?;
    Ok(truth("pipe", None, &peer))
}

fn fifo(path: PathBuf) -> Result<Truth> {
    mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0)?;
    let both = open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let reader = open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut peer = hold(open(&path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?)?;
    drop(both);
    read(reader)?;
    peer.wait()?;
    Ok(truth("fifo", Some(path), &peer))
}

fn poll_pipe(_: PathBuf) -> Result<Truth> {
    let (reader, writer) = std::io::pipe()?;
    let mut peer = hold(writer)?;
    poll(&mut [PollFd::new(&reader, PollFlags::IN)], Some(&Timespec { tv_sec: 900, tv_nsec: 0 }))?;
    peer.wait()?;
    Ok(truth("pipe", None, &peer))
}

fn unix(_: PathBuf) -> Result<Truth> {
    let (client, server) = UnixStream::pair()?;
    let mut peer = hold(server)?;
    read(client)?;
    peer.wait()?;
    Ok(truth("unix_socket", None, &peer))
}

fn tcp(_: PathBuf) -> Result<Truth> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let client = TcpStream::connect(listener.local_addr()?)?;
    let mut peer = hold(listener.accept()?.0)?;
    read(client)?;
    peer.wait()?;
    Ok(truth("tcp", None, &peer))
}

/// No answer from a process that is busy with something else.
fn udp(_: PathBuf) -> Result<Truth> {
    let (server, client) = (UdpSocket::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?);
    client.connect(server.local_addr()?)?;
    let mut command = Command::new("sleep");
    command.arg("1000").stdin(Stdio::from(OwnedFd::from(server))).stdout(Stdio::null());
    let mut peer = command.spawn()?;
    client.set_read_timeout(Some(TIMEOUT))?;
    let _ = client.recv(&mut [0; 8]);
    peer.kill()?;
    peer.wait()?;
    Ok(truth("udp", None, &peer))
}

fn file_lock(path: PathBuf) -> Result<Truth> {
    let file = File::create(&path)?;
    flock(&file, FlockOperation::LockExclusive)?;
    let mut peer = hold(file)?;
    let other = File::open(&path)?;
    flock(&other, FlockOperation::LockExclusive)?;
    peer.wait()?;
    Ok(truth("file_lock", Some(path), &peer))
}

/// A lock that belongs to a process; this one's own locks do not conflict.
fn posix_lock(path: PathBuf) -> Result<Truth> {
    File::create(&path)?;
    let script = "import fcntl,sys,time; f=open(sys.argv[1],'r+'); fcntl.lockf(f,fcntl.LOCK_EX); print(1,flush=True); \
                  time.sleep(1.6)";
    let mut command = Command::new("python3");
    command.args(["-c", script]).arg(&path).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut peer = command.spawn()?;
    let mut output = peer.stdout.take().context("it has an output")?;
    output.read_exact(&mut [0; 1])?;
    let file = File::options().write(true).open(&path)?;
    rustix::fs::fcntl_lock(&file, FlockOperation::LockExclusive)?;
    peer.wait()?;
    Ok(Truth { peer: Some(format!("python3:{}", peer.id())), ..truth("file_lock", Some(path), &peer) })
}

fn child(_: PathBuf) -> Result<Truth> {
    let mut peer = Command::new("sleep").arg(SECONDS).stdin(Stdio::null()).spawn()?;
    peer.wait()?;
    Ok(truth("process", None, &peer))
}

/// No answer from a stopped process.
fn gave_up(_: PathBuf) -> Result<Truth> {
    let (server, client) = (UdpSocket::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?);
    client.connect(server.local_addr()?)?;
    let mut command = Command::new("sleep");
    command.arg("1000").stdin(Stdio::from(OwnedFd::from(server))).stdout(Stdio::null());
    let mut peer = command.spawn()?;
    kill_process(Pid::from_child(&peer), Signal::STOP)?;
    poll(&mut [PollFd::new(&client, PollFlags::IN)], Some(&Timespec::try_from(TIMEOUT)?))?;
    peer.kill()?;
    peer.wait()?;
    Ok(truth("udp", None, &peer))
}

/// Waits for all kinds at once, and returns a line for each wait.
pub fn wait() -> Result<Vec<String>> {
    let rounds = if std::env::var_os("WHYLATE_THOROUGH").is_some() { ROUNDS_THOROUGH } else { ROUNDS };
    let directory = tempfile::tempdir()?;
    let root = fs::canonicalize(directory.path())?;
    let (sender, receiver) = mpsc::channel::<Result<String>>();
    for (name, kind) in KINDS {
        let (sender, root) = (sender.clone(), root.clone());
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            for round in 0..rounds {
                let line = kind(root.join(format!("{name} {round}"))).map(|truth| {
                    let Truth { kind, path, peer } = truth;
                    format!("truth\t{name}\t{kind}\t{}\t{}", path.unwrap_or_default(), peer.unwrap_or_default())
                });
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

/// Compares the objects of each thread with what it printed.
pub fn check(truths: &[String], budget: &Budget) -> Result<()> {
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
    let without_peers: Vec<&str> = KINDS.iter().map(|(name, _)| *name).filter(|name| !of_kind(name)).collect();
    println!("{} of {} waits have object and peer", truths.intersection(&found).count(), truths.len());
    ensure!(others.is_empty() && wrong.is_empty(), "wrong: {others:#?}, {wrong:#?}");
    ensure!(without_peers.is_empty(), "not right in any round: {without_peers:?}");
    Ok(())
}
