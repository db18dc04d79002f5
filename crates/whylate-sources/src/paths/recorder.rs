// SPDX-License-Identifier: MIT OR Apache-2.0
//! The past of all CPUs over any length of time, for as much memory as it is given.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use anyhow::Context as _;
use rustix::fs::{CWD, Mode, OFlags, fstatvfs, openat};
use whylate_model::path::history::{Exit, Slice};
use whylate_model::path::members::Births;
use whylate_model::path::packed::Packed;
use whylate_model::path::stolen::Spread;

use super::asleep::Asleep;
use super::names::PathNames;
use crate::attach::silence_libbpf;
use crate::occupancy::{Edges, Stream};
use crate::session::Session;
use crate::source::AttachError;
use crate::{clock, cpus};

/// What is kept in memory; beyond that it goes into a file.
const MEMORY_BYTES: usize = 64 << 20;
/// Of the file's system, so much is left to others, or a twentieth of a smaller one.
const LEFT_BYTES: u64 = 1 << 30;
/// After so much more in the file, that is looked at again.
const FILE_STEP_BYTES: u64 = 4 << 20;
/// What happened as late as this may not have been written yet.
const SETTLED_NS: u64 = 2_000_000;
/// How many ends of threads are kept.
const DEATHS: usize = 1 << 20;
/// Where files may be large: /tmp is often in memory.
const FOLDERS: [&str; 2] = ["/var/tmp", "/tmp"];

/// How what has happened until a moment is read.
type Read = fn(&mut Stream, u64, &mut dyn FnMut(usize, Slice));

/// Keeps what all CPUs do from its beginning on.
pub struct Recorder {
    edges: Edges,
    stream: Stream,
    past: Packed<File>,
    /// What was in the file when its room was last looked at.
    file_bytes: u64,
    births: Births,
    asleep: Asleep,
    deaths: Vec<(u32, u64)>,
    lost: BTreeMap<String, u64>,
    names: PathNames,
}

/// What was kept.
pub struct Recorded {
    /// What all CPUs did.
    pub past: Spread<Packed<File>>,
    /// Who was made by whom.
    pub births: Births,
    /// Who ended, and when, in order of time on each CPU.
    pub deaths: Vec<(u32, u64)>,
    /// Events that could not be kept, by reason.
    pub lost: BTreeMap<String, u64>,
    /// Names for what stands there as a number.
    pub names: PathNames,
}

impl Recorder {
    /// From now on.
    ///
    /// # Errors
    /// When the kernel does not let its programs in.
    pub fn start() -> Result<Self, AttachError> {
        silence_libbpf();
        let session = Session::of_one();
        let edges = Edges::attach(&session)?;
        let stream = edges.stream().context("the account keeps no wakeups")?;
        let cpus = cpus::highest_possible().context("cannot tell which CPUs there are")? + 1;
        let file = FOLDERS.iter().find_map(|folder| nameless_file(Path::new(folder)).ok());
        let past = Packed::new(cpus as usize, MEMORY_BYTES, file);
        let names = PathNames::new(session.symbols());
        // Without them, these waits are ones that began earlier.
        let asleep = Asleep::now().unwrap_or_default();
        Ok(Recorder {
            edges,
            stream,
            past,
            file_bytes: 0,
            births: Births::default(),
            asleep,
            deaths: Vec::new(),
            lost: BTreeMap::new(),
            names,
        })
    }

    /// Takes in what has happened since the last time: several times a second, or it is overwritten.
    pub fn take_in(&mut self) {
        self.take_in_by(Stream::drain, clock::monotonic_ns().saturating_sub(SETTLED_NS));
        if self.past.in_file_bytes() >= self.file_bytes + FILE_STEP_BYTES {
            self.file_bytes = self.past.in_file_bytes();
            if self.past.file().is_some_and(|file| !has_room(file)) {
                self.past.give_up_file();
            }
        }
    }

    fn take_in_by(&mut self, read: Read, until_ns: u64) {
        let (past, births, asleep) = (&mut self.past, &mut self.births, &mut self.asleep);
        let deaths = &mut self.deaths;
        read(&mut self.stream, until_ns, &mut |cpu, slice| {
            births.add(&slice);
            asleep.add(&slice);
            if let (Exit::Dead, Some(tid)) = (slice.exit, slice.holder.tid()) {
                match deaths.len() < DEATHS {
                    true => deaths.push((tid, slice.end_ns)),
                    false => births.lost += 1,
                }
            }
            past.push(cpu, slice);
        });
    }

    /// What was kept up to that moment, which is over.
    pub fn finish(mut self, until_ns: u64) -> Recorded {
        // Whoever ended just then still has a CPU for a moment.
        while clock::monotonic_ns() < until_ns + 2 * SETTLED_NS {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        self.take_in_by(Stream::finish, until_ns + SETTLED_NS);
        for (reason, count) in self.edges.take_lost() {
            *self.lost.entry(reason.to_owned()).or_default() += count;
        }
        let Recorder { past, births, asleep, deaths, mut lost, mut names, .. } = self;
        names.knows(asleep.calls());
        lost.insert("births_full".to_owned(), births.lost);
        lost.insert("records_given_up".to_owned(), past.given_up());
        Recorded { past: Spread::new(past), births, deaths, lost, names }
    }
}

/// Whether others have enough room left beside the file: whylate is root, and would be given the last byte.
fn has_room(file: &File) -> bool {
    fstatvfs(file).is_ok_and(|about| {
        let bytes = |blocks: u64| blocks.saturating_mul(about.f_frsize);
        bytes(about.f_bavail) >= (bytes(about.f_blocks) / 20).min(LEFT_BYTES)
    })
}

/// A file that is gone when it is closed, however that happens.
fn nameless_file(folder: &Path) -> rustix::io::Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(openat(CWD, folder, flags, Mode::RUSR | Mode::WUSR)?.into())
}
