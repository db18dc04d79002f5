// SPDX-License-Identifier: MIT OR Apache-2.0
//! HTTP server of `whylate serve`: one thread, with bounded connections, memory and times, which only reads what the
//! measuring thread has published. So neither a scrape nor a client that is stuck delays a measurement.

mod child;
mod connection;
pub mod cost;
pub mod listener;
mod request;

use std::collections::VecDeque;
use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use whylate_sources::kernel::least_privilege::{drop_capabilities, drop_effective_capabilities};

use self::child::Child;
use self::connection::{Connection, Progress};
use self::listener::Listener;
use self::request::{Method, Reply, Request, Status};
use crate::render::metrics::{Form, Pages};

/// Maximum number of connections. Beyond it the oldest one is closed.
const MAX_CONNECTIONS: usize = 128;
/// Maximum number of connections that are accepted before others are read.
const AT_ONCE: usize = 16;
/// Pause after a connection could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);
/// Time in which a request has to arrive, and its reply to be read.
const DEADLINE: Duration = Duration::from_secs(5);
/// A tick that is later than this many intervals, and than this time, makes the server unhealthy. A busy machine delays
/// ticks by seconds.
const STALE_INTERVALS: u32 = 3;
const MIN_STALE: Duration = Duration::from_secs(30);

/// What the measuring thread publishes for the server.
#[derive(Debug, Default)]
pub struct Published {
    pages: Mutex<Arc<Pages>>,
    /// When `pages` become too old; `None` if they never do.
    stale: Mutex<Option<Instant>>,
    /// Whether an interval has ended.
    is_ready: AtomicBool,
    /// Whether the server has ended.
    has_ended: AtomicBool,
    /// Number of connections that were closed because there were too many.
    refused: AtomicU64,
    /// Whether a client has asked to keep the recording.
    is_asked_to_keep: AtomicBool,
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is stored is replaced as a whole.
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Published {
    /// Publishes metrics: of an interval that has ended, or of none yet. Replaced after `interval`; without one, they stay.
    pub fn publish(&self, pages: Pages, is_ready: bool, interval: Option<Duration>) {
        *locked(&self.pages) = Arc::new(pages);
        let lasts = |interval: Duration| interval.saturating_mul(STALE_INTERVALS).max(MIN_STALE);
        *locked(&self.stale) = interval.and_then(|interval| Instant::now().checked_add(lasts(interval)));
        self.is_ready.store(is_ready, Ordering::Relaxed);
    }

    /// Returns whether the server has ended, which it does not do by itself.
    pub fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }

    /// Returns whether the metrics are older than they should become.
    fn are_stale(&self) -> bool {
        locked(&self.stale).is_some_and(|stale| stale < Instant::now())
    }

    /// Returns the number of connections that were closed because there were too many.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Returns whether a client has asked to keep the recording since the last call.
    pub fn take_request_to_keep(&self) -> bool {
        self.is_asked_to_keep.swap(false, Ordering::Relaxed)
    }
}

/// What the server does beside metrics.
#[derive(Clone, Copy, Debug)]
pub struct Offers {
    /// There is a recording to keep.
    pub can_keep: bool,
    /// It makes profiles and reports.
    pub has_debug: bool,
}

/// The server's thread. Dropping the server ends it.
#[derive(Debug)]
pub struct Server {
    stop: UnixStream,
    /// Returns the listeners: the thread lacks the capability to remove a socket from another user's directory.
    thread: Option<JoinHandle<Vec<Listener>>>,
}

impl Server {
    /// Starts to serve `offers`.
    ///
    /// # Errors
    /// Fails if no thread can be started.
    pub fn start(listeners: Vec<Listener>, published: Arc<Published>, offers: Offers) -> anyhow::Result<Self> {
        let (stop, stopped) = UnixStream::pair().context("no descriptor is left")?;
        let (wake, woken) = UnixStream::pair().context("no descriptor is left")?;
        woken.set_nonblocking(true)?;
        for listener in &listeners {
            listener.set_nonblocking()?;
        }
        let mut state = State {
            listeners,
            published,
            offers,
            connections: VecDeque::new(),
            child: None,
            wake: Arc::new(wake),
            woken,
            stopped,
            accepts_at: None,
        };
        child::remove_left_behind();
        let thread = thread::Builder::new().name("whylate-serve".to_owned()).spawn(move || {
            state.run();
            state.listeners
        })?;
        Ok(Server { stop, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.stop.shutdown(std::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct State {
    listeners: Vec<Listener>,
    published: Arc<Published>,
    offers: Offers,
    /// Oldest first.
    connections: VecDeque<Connection>,
    /// The process that makes a profile or a report, of which there is one at a time.
    child: Option<Child>,
    /// Written to when that process has ended.
    wake: Arc<UnixStream>,
    woken: UnixStream,
    stopped: UnixStream,
    /// When connections are accepted again, after an error.
    accepts_at: Option<Instant>,
}

impl State {
    fn run(&mut self) {
        // However it ends, the measuring thread gets to know.
        struct Ends(Arc<Published>);
        impl Drop for Ends {
            fn drop(&mut self) {
                self.0.has_ended.store(true, Ordering::Relaxed);
            }
        }
        let _ends = Ends(Arc::clone(&self.published));
        // Parsing needs no capability. A profile's process gets those that are still permitted.
        if self.offers.has_debug {
            let _ = drop_effective_capabilities();
        } else {
            drop_capabilities();
        }
        while let Ok(true) = self.turn() {}
    }

    /// Waits for an event and handles it. Returns whether to go on.
    fn turn(&mut self) -> io::Result<bool> {
        // The reply to a waiting connection comes from the child, in its time.
        let deadlines = self.connections.iter().filter(|connection| !connection.is_waiting());
        let until = deadlines.map(|connection| connection.deadline).chain(self.accepts_at).min();
        let timeout = until.map(|until| until.saturating_duration_since(Instant::now()) + Duration::from_millis(1));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut watched = vec![
            PollFd::from_borrowed_fd(self.stopped.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.woken.as_fd(), PollFlags::IN),
        ];
        let interest = if self.accepts_at.is_none() { PollFlags::IN } else { PollFlags::empty() };
        watched.extend(self.listeners.iter().map(|of| PollFd::from_borrowed_fd(of.as_fd(), interest)));
        watched.extend(self.connections.iter().map(|of| PollFd::from_borrowed_fd(of.as_fd(), of.interest())));
        match poll(&mut watched, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_ready: Vec<bool> = watched.iter().map(|of| !of.revents().is_empty()).collect();
        drop(watched);
        if is_ready[0] {
            return Ok(false);
        }
        if is_ready[1] {
            let _ = self.woken.read(&mut [0; 16]);
            self.collect();
        }
        let (of_listeners, of_connections) = is_ready[2..].split_at(self.listeners.len());
        self.advance(of_connections);
        match self.accepts_at {
            Some(at) if Instant::now() < at => {}
            Some(_) => self.accepts_at = None,
            None => (0..self.listeners.len()).filter(|&at| of_listeners[at]).for_each(|at| self.accept(at)),
        }
        Ok(true)
    }

    /// Accepts what has come in, up to a number that no flood can raise.
    fn accept(&mut self, at: usize) {
        for _ in 0..AT_ONCE {
            match self.listeners[at].accept() {
                Ok(Some(stream)) => {
                    self.connections.push_back(Connection::new(stream, Instant::now() + DEADLINE));
                    if self.connections.len() > MAX_CONNECTIONS {
                        self.close_one();
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    // The listener stays readable: without a pause, the thread would do nothing else.
                    self.accepts_at = Some(Instant::now() + PAUSE);
                    let has_no_descriptor = error.raw_os_error().map(rustix::io::Errno::from_raw_os_error);
                    if matches!(has_no_descriptor, Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE)) {
                        self.close_one();
                    }
                    return;
                }
            }
        }
    }

    /// Closes the oldest connection without a request, or else the oldest one that does not await the child process.
    fn close_one(&mut self) {
        let oldest = |is_it: fn(&Connection) -> bool| self.connections.iter().position(is_it);
        if let Some(at) = oldest(Connection::is_silent).or_else(|| oldest(|connection| !connection.is_waiting())) {
            self.connections.remove(at);
            self.published.refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Reads and writes where that is possible, replies, and closes what is done or too slow.
    fn advance(&mut self, is_ready: &[bool]) {
        let now = Instant::now();
        let mut kept = VecDeque::new();
        for (at, mut connection) in std::mem::take(&mut self.connections).into_iter().enumerate() {
            let is_ready = is_ready.get(at).copied().unwrap_or(false);
            let progress = if is_ready { connection.advance() } else { Progress::Goes };
            match progress {
                Progress::Requests(request) => {
                    self.reply(&mut connection, &request);
                    kept.push_back(connection);
                }
                Progress::Refused(status) => {
                    connection.reply(Reply::short(status), now + DEADLINE);
                    kept.push_back(connection);
                }
                Progress::Goes if connection.is_waiting() || now < connection.deadline => kept.push_back(connection),
                Progress::Goes | Progress::Ended => {
                    if connection.is_waiting()
                        && let Some(child) = &self.child
                    {
                        // It is there until it has ended, so that there is never a second one.
                        child.cancel();
                    }
                }
            }
        }
        self.connections = kept;
    }

    fn reply(&mut self, connection: &mut Connection, request: &Request) {
        let reply = match (request.method, request.path.as_str()) {
            _ if connection.is_loopback() && !request.names_this_machine() => {
                Reply::text(Status::Forbidden, OTHER_HOST)
            }
            (Method::Get | Method::Head, "/metrics") => {
                let form = Form::preferred(&request.accept);
                let pages = Arc::clone(&locked(&self.published.pages));
                Reply::page(form.content_type(), pages, form)
            }
            (Method::Get | Method::Head, "/-/healthy") => self.health(),
            (Method::Get | Method::Head, "/-/ready") if !self.published.is_ready.load(Ordering::Relaxed) => {
                Reply::text(Status::Unavailable, "the first interval is not over yet\n")
            }
            (Method::Get | Method::Head, "/-/ready") => self.health(),
            (Method::Get | Method::Head, "/") => Reply::text(Status::Ok, INDEX),
            (Method::Get, "/debug/pprof/offcpu" | "/debug/report") if !self.offers.has_debug => {
                Reply::text(Status::NotFound, "profiles and reports are disabled (--no-debug)\n")
            }
            (Method::Get, path @ ("/debug/pprof/offcpu" | "/debug/report")) => match self.start_child(path, request) {
                Ok(deadline) => return connection.wait(deadline),
                Err(reply) => reply,
            },
            (Method::Post, "/-/keep") if !connection.is_local() => {
                Reply::text(Status::Forbidden, "only over the Unix socket\n")
            }
            (Method::Post, "/-/keep") if !self.offers.can_keep => Reply::text(
                Status::NotFound,
                "no flight recorder is running: start whylate serve with --record DIR/ --ring TIME\n",
            ),
            (Method::Post, "/-/keep") => {
                self.published.is_asked_to_keep.store(true, Ordering::Relaxed);
                Reply::text(Status::Ok, "a file will be written\n")
            }
            (_, "/-/keep") => Reply::not_allowed("POST"),
            (_, "/debug/pprof/offcpu" | "/debug/report") => Reply::not_allowed("GET"),
            (_, "/metrics" | "/-/healthy" | "/-/ready" | "/") => Reply::not_allowed("GET, HEAD"),
            _ => Reply::text(Status::NotFound, INDEX),
        };
        let reply = if request.method == Method::Head { reply.without_body() } else { reply };
        connection.reply(reply, Instant::now() + DEADLINE);
    }

    fn health(&self) -> Reply {
        if self.published.are_stale() {
            return Reply::text(Status::Unavailable, "no interval has ended for long\n");
        }
        Reply::text(Status::Ok, "ok\n")
    }

    /// Starts the process that makes a profile or a report. Returns when its reply is due at the latest.
    fn start_child(&mut self, path: &str, request: &Request) -> Result<Instant, Reply> {
        // A reply that its client does not read takes memory, too.
        if self.child.is_some() || self.connections.iter().any(Connection::writes_made) {
            return Err(Reply::text(Status::Unavailable, "one profile or report at a time: try again later\n"));
        }
        let seconds = request.seconds().map_err(|error| Reply::text(Status::BadRequest, &error))?;
        let kind = if path == "/debug/report" { child::Kind::Report } else { child::Kind::Profile };
        let child = Child::start(kind, seconds, Arc::clone(&self.wake))
            .map_err(|error| Reply::text(Status::Failed, &format!("{error:#}\n")))?;
        let deadline = child.deadline();
        self.child = Some(child);
        Ok(deadline)
    }

    /// Replies with what the child process has made.
    fn collect(&mut self) {
        let Some(made) = self.child.as_mut().and_then(Child::take) else { return };
        self.child = None;
        let reply = match made {
            Ok((content_type, body)) => Reply::body(content_type, body),
            Err(error) => Reply::text(Status::Failed, &format!("{error:#}\n")),
        };
        if let Some(connection) = self.connections.iter_mut().find(|connection| connection.is_waiting()) {
            connection.reply_made(reply, Instant::now() + DEADLINE * 6);
        }
    }
}

/// Reply to a browser with a page of another site, if the name of that site resolves to this machine (DNS rebinding).
const OTHER_HOST: &str =
    "on a loopback address, the host in the URL must be an address, localhost or this machine's name\n";

const INDEX: &str = "\
whylate serve

GET  /metrics                       counters and histograms, for Prometheus
GET  /-/healthy                     200 while intervals end in time
GET  /-/ready                       200 from the end of the first interval
GET  /debug/pprof/offcpu?seconds=N  where threads wait, for go tool pprof, Parca and Alloy
GET  /debug/report?seconds=N        a report, as one HTML page
POST /-/keep                        write a flight-recorder file; over the Unix socket only
";
