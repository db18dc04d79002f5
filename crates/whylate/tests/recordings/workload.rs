// SPDX-License-Identifier: MIT OR Apache-2.0
//! What runs while `scripts/golden-recordings` records: waits for a mutex, a pipe, a file lock and a disk, names that
//! try to be more than names, and many threads. A program of its own: rustc alone builds it.
//!
//! `workload waits|names|threads SECONDS [FOLDER [DISK]]`: locks a file in that folder, writes to a file there or to that disk.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::Path;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// How long a thread keeps others waiting, and how often.
const HELD: Duration = Duration::from_millis(12);
const PERIOD: Duration = Duration::from_millis(250);

/// The kernel keeps 15 bytes of each.
const HOSTILE: [&[u8]; 10] = [
    b"x:42",
    b"a (b by c)",
    b"<script>",
    b"\x1b[31mred\x1b[0m",
    b"two\nlines\tx",
    "\u{202e}drowssap".as_bytes(),
    b"\xff\xfe\x80bytes",
    b"\"quote\\",
    b"CPU 0",
    b"a;b,c=d|e f",
];

fn spin(time: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// A thread of this name: any bytes but NUL.
fn start(name: &[u8], mut body: impl FnMut() -> io::Result<()> + Send + 'static, until: Instant) {
    let name = name.to_vec();
    thread::spawn(move || {
        let _ = fs::write("/proc/thread-self/comm", name);
        while Instant::now() < until {
            if let Err(error) = body() {
                eprintln!("workload: {error}");
                return;
            }
        }
    });
}

/// One thread holds a mutex and computes, the other one waits for it.
fn mutex(holder: &[u8], waiter: &[u8], until: Instant) {
    let (mutex, both) = (Arc::new(Mutex::new(())), Arc::new(Barrier::new(2)));
    let (its, begin) = (Arc::clone(&mutex), Arc::clone(&both));
    let hold = move || {
        let guard = its.lock().expect("nothing panics");
        begin.wait();
        spin(HELD);
        drop(guard);
        thread::sleep(PERIOD);
        Ok(())
    };
    let wait = move || {
        both.wait();
        drop(mutex.lock().expect("nothing panics"));
        Ok(())
    };
    start(holder, hold, until);
    start(waiter, wait, until);
}

fn waits(folder: &Path, disk: &Path, until: Instant) -> io::Result<()> {
    mutex(b"mutex-holder", b"mutex-waiter", until);

    let (mut reader, mut writer) = io::pipe()?;
    let produce = move || {
        thread::sleep(PERIOD);
        spin(HELD);
        writer.write_all(b".")
    };
    start(b"pipe-writer", produce, until);
    start(b"pipe-reader", move || reader.read_exact(&mut [0]), until);

    let path = folder.join("lock");
    let (ours, theirs) = (File::create(&path)?, File::create(&path)?);
    let hold = move || {
        ours.lock()?;
        spin(HELD);
        ours.unlock()?;
        thread::sleep(PERIOD);
        Ok(())
    };
    let wait = move || {
        theirs.lock()?;
        theirs.unlock()?;
        thread::sleep(Duration::from_millis(2));
        Ok(())
    };
    start(b"flock-holder", hold, until);
    start(b"flock-waiter", wait, until);

    let mut file = File::create(disk)?;
    let write = move || {
        file.write_all(&[1; 65536])?;
        file.sync_all()?;
        thread::sleep(PERIOD);
        Ok(())
    };
    start(b"disk-writer", write, until);
    Ok(())
}

fn threads(until: Instant) {
    for number in 0..4 {
        mutex(format!("pool-{number}").as_bytes(), format!("client-{number}").as_bytes(), until);
    }
    for number in 0..120 {
        let nap = move || {
            thread::sleep(Duration::from_millis(40 + number % 7));
            spin(Duration::from_micros(200));
            Ok(())
        };
        start(format!("worker-{number}").as_bytes(), nap, until);
    }
}

fn main() -> io::Result<()> {
    let words: Vec<String> = std::env::args().collect();
    let seconds = words.get(2).and_then(|word| word.parse().ok()).unwrap_or(3);
    let until = Instant::now() + Duration::from_secs(seconds);
    match words.get(1).map(String::as_str) {
        Some("waits") => {
            let folder = Path::new(words.get(3).map_or("/tmp", String::as_str));
            waits(folder, &words.get(4).map_or_else(|| folder.join("data"), Into::into), until)?;
        }
        Some("names") => {
            fs::write("/proc/self/comm", "main: (1)")?;
            HOSTILE.chunks_exact(2).for_each(|pair| mutex(pair[0], pair[1], until));
        }
        Some("threads") => threads(until),
        _ => return Err(io::Error::other("say waits, names or threads")),
    }
    thread::sleep(until.saturating_duration_since(Instant::now()));
    Ok(())
}
