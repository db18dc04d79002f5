// SPDX-License-Identifier: MIT OR Apache-2.0
//! A folder of recordings: a new file a day and a start, and old ones go.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use rustix::fs::{FlockOperation, flock, fstatvfs};
use rustix::process::geteuid;
use whylate_model::recording::{Header, Index};
use whylate_sources::clock;

use super::EXTENSION;
use super::file::FileStore;
use super::store::Store;

const DAY_NS: u64 = 86_400_000_000_000;
/// Where a size or an age is given, files are so much smaller that what goes with the oldest one is a small part.
const FILES: u64 = 8;
/// What names begin with, for any digit.
const STAMP: &str = "0000-00-00T000000";
/// What keeps two programs from the same folder.
const LOCK: &str = ".lock";

/// How much of the past is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// Files whose last change is longer ago go.
    pub keep_ns: Option<u64>,
    /// The oldest go while all, the one that is written included, are larger.
    pub most_bytes: Option<u64>,
    /// So many bytes of the file system stay free.
    pub min_free: u64,
}

/// Writes files into a folder.
#[derive(Debug)]
pub struct FolderStore {
    folder: PathBuf,
    /// Held as long as this lives.
    lock: File,
    retention: Retention,
    file: Option<FileStore>,
    /// When the file was begun.
    begun_ns: u64,
    made: Vec<PathBuf>,
    written: u64,
}

impl FolderStore {
    /// Makes the folder if it is not there, for its owner alone.
    ///
    /// # Errors
    /// When it cannot be made, or another program records there.
    pub fn open(folder: &Path, retention: Retention) -> io::Result<Self> {
        match DirBuilder::new().mode(0o700).create(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let about = fs::metadata(folder)?;
        if about.uid() != geteuid().as_raw() {
            return Err(io::Error::other("it belongs to another user (choose another folder)"));
        }
        let lock = crate::files::create(&folder.join(LOCK))?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(io::Error::other("another whylate is recording to it (choose another folder)"));
        }
        let folder = folder.to_owned();
        Ok(FolderStore { folder, lock, retention, file: None, begun_ns: 0, made: Vec::new(), written: 0 })
    }

    /// The next frame begins a new file.
    pub fn end_file(&mut self) -> io::Result<()> {
        self.file.take().map_or(Ok(()), |mut file| file.finish())
    }

    fn is_due(&self, file: &FileStore, now_ns: u64) -> bool {
        let Retention { keep_ns, most_bytes, .. } = self.retention;
        let is_large = most_bytes.is_some_and(|most| file.bytes() >= most / FILES);
        let is_long = keep_ns.is_some_and(|most_ns| now_ns.saturating_sub(self.begun_ns) >= most_ns / FILES);
        now_ns / DAY_NS != self.begun_ns / DAY_NS || is_large || is_long
    }

    /// A new file, named after the moment in UTC; with a number where there is one.
    fn create(&self, now_ns: u64) -> io::Result<FileStore> {
        let stamp = Timestamp::from_nanosecond(now_ns.into()).map_err(io::Error::other)?;
        let name = stamp.strftime("%Y-%m-%dT%H%M%SZ").to_string();
        for number in 0..100 {
            let number = if number == 0 { String::new() } else { format!("-{number}") };
            let path = self.folder.join(format!("{name}{number}.{EXTENSION}"));
            match FileStore::create_new(&path, self.retention.min_free) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => return made,
            }
        }
        Err(io::Error::other("this second already has 100 recordings (try again)"))
    }

    fn is_above_min_free(&self) -> io::Result<bool> {
        if self.retention.min_free == 0 {
            return Ok(true);
        }
        let about = fstatvfs(&self.lock)?;
        Ok(about.f_bavail.saturating_mul(about.f_frsize) >= self.retention.min_free)
    }

    /// Takes old files away.
    fn retain(&self) {
        let Retention { keep_ns, most_bytes, .. } = self.retention;
        let mut files = recordings_in(&self.folder);
        let active = self.file.as_ref().map(FileStore::path);
        let mut all_bytes: u64 = files.iter().map(|file| file.bytes).sum();
        let oldest = keep_ns.and_then(|ns| SystemTime::now().checked_sub(Duration::from_nanos(ns)));
        files.sort_by(|a, b| a.path.cmp(&b.path));
        // The first in name is the oldest.
        for file in files.iter().filter(|file| Some(file.path.as_path()) != active) {
            let is_old = oldest.is_some_and(|oldest| file.changed < oldest);
            let is_too_much = most_bytes.is_some_and(|most| all_bytes > most);
            if (is_old || is_too_much) && fs::remove_file(&file.path).is_ok() {
                all_bytes -= file.bytes;
            }
        }
    }
}

struct Kept {
    path: PathBuf,
    bytes: u64,
    changed: SystemTime,
}

/// Whether `create` gives such names: others are somebody's, who wants to keep them.
fn is_of_a_moment(name: &str) -> bool {
    let Some((stamp, rest)) = name.strip_suffix(EXTENSION).and_then(|name| name.strip_suffix('.')?.split_once('Z'))
    else {
        return false;
    };
    let is_like = |c: char, like: char| if like == '0' { c.is_ascii_digit() } else { c == like };
    let number = rest.strip_prefix('-').unwrap_or(rest);
    stamp.len() == STAMP.len()
        && stamp.chars().zip(STAMP.chars()).all(|(c, like)| is_like(c, like))
        && number.chars().all(|c| c.is_ascii_digit())
}

/// What this user has recorded there.
fn recordings_in(folder: &Path) -> Vec<Kept> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut files = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        let is_ours = entry.file_name().to_str().is_some_and(is_of_a_moment);
        let about = entry.metadata().ok();
        let about = about.filter(|about| is_ours && about.is_file() && about.uid() == geteuid().as_raw());
        if let Some((about, changed)) = about.and_then(|about| Some((about.len(), about.modified().ok()?))) {
            files.push(Kept { path, bytes: about, changed });
        }
    }
    files
}

impl Store for FolderStore {
    fn begin_frame(&mut self, header: &Header) -> io::Result<()> {
        let now_ns = clock::unix_ns();
        let mut header = header.clone();
        if self.file.as_ref().is_some_and(|file| self.is_due(file, now_ns)) {
            self.end_file()?;
            header.start_unix_ns = now_ns;
        }
        if self.file.is_none() {
            let file = self.create(now_ns)?;
            self.made.push(file.path().to_owned());
            (self.file, self.begun_ns) = (Some(file), now_ns);
        }
        self.retain();
        match &mut self.file {
            Some(file) => file.begin_frame(&header),
            None => Err(io::Error::other("there is no file")),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.file.as_mut().map_or(Ok(()), |file| file.write(bytes))
    }

    fn end_frame(&mut self, index: &Index) -> io::Result<()> {
        self.file.as_mut().map_or(Ok(()), |file| file.end_frame(index))
    }

    fn finish(&mut self) -> io::Result<()> {
        self.end_file()
    }

    fn give_up_frame(&mut self) {
        if let Some(file) = &mut self.file {
            file.give_up_frame();
        }
    }

    fn has_room(&self) -> io::Result<bool> {
        if self.is_above_min_free()? {
            return Ok(true);
        }
        // What is due to go makes room.
        self.retain();
        self.is_above_min_free()
    }

    fn bytes(&self) -> u64 {
        self.written
    }

    fn files(&self) -> Vec<PathBuf> {
        self.made.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn fill(store: &mut FolderStore, frames: usize, bytes: usize) {
        for _ in 0..frames {
            store.begin_frame(&Header::default()).expect("begun");
            store.write(&vec![7; bytes]).expect("written");
            store.end_frame(&Index { bytes: bytes as u64, lines: 1, ..Index::default() }).expect("ended");
        }
    }

    #[test]
    fn all_files_together_stay_below_the_limit() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("kept");
        let retention = Retention { most_bytes: Some(1 << 20), ..Retention::default() };
        let mut store = FolderStore::open(&path, retention).expect("made");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o700);
        assert!(FolderStore::open(&path, retention).is_err(), "two programs");
        for other in ["notes.txt", "before-upgrade.whylate"] {
            fs::write(path.join(other), vec![0; 2 << 20]).expect("written");
        }
        for _ in 0..60 {
            fill(&mut store, 1, 60_000);
            let all: u64 = recordings_in(&path).iter().map(|file| file.bytes).sum();
            assert!(all <= (1 << 20) + 70_000, "{all}");
        }
        assert!(recordings_in(&path).len() > 3 && path.join("notes.txt").exists());
        assert!(path.join("before-upgrade.whylate").exists());
        drop(store);
        // After a while, only what is written is left.
        std::thread::sleep(Duration::from_millis(20));
        let retention = Retention { keep_ns: Some(1_000_000), ..Retention::default() };
        let mut store = FolderStore::open(&path, retention).expect("the former one has gone");
        fill(&mut store, 1, 10);
        assert_eq!(recordings_in(&path).len(), 1);
    }

    #[test]
    fn a_link_is_not_followed() {
        let folder = tempfile::tempdir().expect("a folder");
        std::os::unix::fs::symlink("/etc/passwd", folder.path().join(LOCK)).expect("linked");
        assert!(FolderStore::open(folder.path(), Retention::default()).is_err());
    }
}
