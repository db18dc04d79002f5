// SPDX-License-Identifier: MIT OR Apache-2.0
//! A served recording or machine, and a client.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::Signal;

use crate::running::{Running, whylate};

/// Far above what any step takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A running exporter.
pub struct Served {
    pub running: Running,
    /// Address and port.
    pub address: String,
    /// Whether it has said that its recording has ended.
    has_ended: Arc<AtomicBool>,
}

/// What a client has received.
#[derive(Debug)]
pub struct Received {
    pub status: u16,
    head: String,
    pub body: Vec<u8>,
}

impl Received {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Returns the value of a header field.
    pub fn field(&self, name: &str) -> &str {
        let mut fields = self.head.lines().filter_map(|line| line.split_once(": "));
        fields.find(|(field, _)| field.eq_ignore_ascii_case(name)).map_or("", |(_, value)| value)
    }
}

impl Served {
    /// Serves a recording, as if it had been replayed to its end.
    pub fn replay(recording: &str, options: &[&str]) -> Result<Self> {
        let served = Self::start(&[&["replay", "--speed", "1000000", recording, "serve"], options].concat())?;
        let deadline = Instant::now() + TIMEOUT;
        while !served.has_ended.load(Ordering::Relaxed) {
            ensure!(Instant::now() < deadline, "the recording does not end");
            thread::sleep(Duration::from_millis(5));
        }
        Ok(served)
    }

    /// Ends it, and waits for that.
    pub fn stop(&mut self) -> Result<()> {
        self.running.signal(Signal::TERM)?;
        while self.running.is_alive()? {
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Starts a command that serves, also on a free port.
    pub fn start(arguments: &[&str]) -> Result<Self> {
        Self::of(&mut whylate(arguments))
    }

    /// Starts a command whose last words are those of one that serves, also on a free port.
    pub fn of(command: &mut Command) -> Result<Self> {
        let mut running = Running::of(command.args(["--listen", "127.0.0.1:0"]))?;
        let mut said = BufReader::new(running.stderr()?);
        let mut all = String::new();
        let address = loop {
            let mut line = String::new();
            if said.read_line(&mut line)? == 0 {
                bail!("it ends before it serves: {all}");
            }
            if let Some((_, address)) = line.split_once("http://") {
                let address = address.split([',', ' ']).next().context("an address")?;
                break address.trim().to_owned();
            }
            all += &line;
        };
        // Whatever it says later does not stop it.
        let has_ended = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&has_ended);
        thread::spawn(move || {
            for line in said.lines().map_while(Result::ok) {
                seen.fetch_or(line.contains("the recording has ended"), Ordering::Relaxed);
            }
        });
        Ok(Served { running, address, has_ended })
    }
}

/// Sends a request, and returns what comes back.
pub fn request(served: &Served, sent: &[u8]) -> Result<Received> {
    let mut stream = TcpStream::connect(&served.address)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(sent)?;
    let mut received = Vec::new();
    // What is left unread when the server closes resets the connection, after the reply.
    let ended = stream.read_to_end(&mut received);
    let end = received.windows(4).position(|part| part == b"\r\n\r\n");
    let end = end.with_context(|| format!("no reply: {ended:?}, {:?}", String::from_utf8_lossy(&received)))?;
    let head = String::from_utf8_lossy(&received[..end]).into_owned();
    let status = head.split(' ').nth(1).context("a status")?.parse()?;
    Ok(Received { status, head, body: received[end + 4..].to_vec() })
}

/// Gets a page.
pub fn get(served: &Served, path: &str, accept: &str) -> Result<Received> {
    request(served, format!("GET {path} HTTP/1.1\r\nHost: {}\r\nAccept: {accept}\r\n\r\n", served.address).as_bytes())
}
