// SPDX-License-Identifier: MIT OR Apache-2.0
//! A recording as one file.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock, fstatvfs};
use whylate_model::recording::{Header, INDEX_BYTES, Index};

use super::store::{Store, head, tail};
use crate::files;

/// Writes one file, each frame behind its index.
#[derive(Debug)]
pub struct FileStore {
    file: File,
    path: PathBuf,
    /// Where the frame's index is.
    index_at: u64,
    /// Where the next bytes go.
    end: u64,
    /// Bytes of the file system that stay free.
    min_free: u64,
    has_header: bool,
    /// It is somebody's work, and is only emptied once there is something to write.
    was_there: bool,
}

impl FileStore {
    /// Makes the file, or takes the user's own one, for its owner alone; the first frame empties it. `min_free` bytes of
    /// its file system stay free.
    ///
    /// # Errors
    /// When it cannot be made, or somebody else writes to it.
    pub fn create(path: &Path, min_free: u64) -> io::Result<Self> {
        let was_there = fs::symlink_metadata(path).is_ok();
        Self::of(files::open(path)?, path, min_free, was_there)
    }

    /// Makes a new file.
    ///
    /// # Errors
    /// When one is there, or it cannot be made.
    pub fn create_new(path: &Path, min_free: u64) -> io::Result<Self> {
        Self::of(files::create_new(path)?, path, min_free, false)
    }

    fn of(file: File, path: &Path, min_free: u64, was_there: bool) -> io::Result<Self> {
        locked(&file)?;
        if let Some(folder) = path.parent() {
            let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
            // Else its name may be gone after a power cut. Not every file system can.
            let _ = File::open(folder).and_then(|folder| folder.sync_all());
        }
        Ok(FileStore { file, path: path.to_owned(), index_at: 0, end: 0, min_free, has_header: false, was_there })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn locked(file: &File) -> io::Result<()> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        // Not every file system and device has locks.
        Err(rustix::io::Errno::WOULDBLOCK) => {
            Err(io::Error::other("another whylate is recording to it (choose another file)"))
        }
        _ => Ok(()),
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        // Nothing was measured.
        if !self.has_header && !self.was_there {
            files::take_away(&self.file, &self.path);
        }
    }
}

impl Store for FileStore {
    fn begin_frame(&mut self, header: &Header) -> io::Result<()> {
        if !self.has_header {
            let (index, bytes) = head(header)?;
            self.index_at = 0;
            if self.file.metadata()?.is_file() {
                self.file.set_len(0)?;
            }
            self.file.write_all_at(&index.to_bytes(), 0)?;
            self.file.write_all_at(&bytes, INDEX_BYTES as u64)?;
            self.end = INDEX_BYTES as u64 + index.bytes;
            self.has_header = true;
        }
        self.index_at = self.end;
        self.file.write_all_at(&Index::default().to_bytes(), self.end)?;
        self.end += INDEX_BYTES as u64;
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.end)?;
        self.end += bytes.len() as u64;
        Ok(())
    }

    fn end_frame(&mut self, index: &Index) -> io::Result<()> {
        // Of an index that is there, all is there.
        self.file.sync_data()?;
        self.file.write_all_at(&index.to_bytes(), self.index_at)?;
        self.index_at = self.end;
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        let (index, bytes) = tail()?;
        self.file.write_all_at(&bytes, self.end + INDEX_BYTES as u64)?;
        self.file.write_all_at(&index.to_bytes(), self.end)?;
        self.end += INDEX_BYTES as u64 + index.bytes;
        // What a frame that was given up has left.
        self.file.set_len(self.end)?;
        self.file.sync_all()
    }

    fn give_up_frame(&mut self) {
        self.end = self.index_at;
    }

    fn has_room(&self) -> io::Result<bool> {
        if self.min_free == 0 {
            return Ok(true);
        }
        let about = fstatvfs(&self.file)?;
        Ok(about.f_bavail.saturating_mul(about.f_frsize) >= self.min_free)
    }

    fn bytes(&self) -> u64 {
        self.end
    }

    fn files(&self) -> Vec<PathBuf> {
        vec![self.path.clone()]
    }
}
