// SPDX-License-Identifier: MIT OR Apache-2.0
//! A recording in one file.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock, fstatvfs};
use whylate_model::recording::{Header, INDEX_BYTES, Index};

use super::destination::{Store, head, tail};
use crate::files;

/// Writes one file, in which each frame follows its index.
#[derive(Debug)]
pub struct FileStore {
    file: File,
    path: PathBuf,
    /// Offset of the current frame's index.
    index_at: u64,
    /// Offset of the next write.
    end: u64,
    /// Bytes of the file system to leave free.
    min_free: u64,
    has_header: bool,
    /// Whether the file existed before. It is only emptied once there is something to write.
    existed: bool,
}

impl FileStore {
    /// Creates the file, readable by its owner only, or opens an existing file of the user, which the first frame
    /// empties. Recording pauses while its file system has less than `min_free` bytes free.
    ///
    /// # Errors
    /// Fails if the file cannot be created, or another process has locked it.
    pub fn create(path: &Path, min_free: u64) -> io::Result<Self> {
        let existed = fs::symlink_metadata(path).is_ok();
        Self::with_file(files::open(path)?, path, min_free, existed)
    }

    /// Creates a new file.
    ///
    /// # Errors
    /// Fails if the file exists or cannot be created.
    pub fn create_new(path: &Path, min_free: u64) -> io::Result<Self> {
        Self::with_file(files::create_new(path)?, path, min_free, false)
    }

    fn with_file(file: File, path: &Path, min_free: u64, existed: bool) -> io::Result<Self> {
        lock_exclusively(&file)?;
        if let Some(directory) = path.parent() {
            let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
            // Otherwise a power failure may lose its directory entry. Not every file system can sync a directory.
            let _ = File::open(directory).and_then(|directory| directory.sync_all());
        }
        Ok(FileStore { file, path: path.to_owned(), index_at: 0, end: 0, min_free, has_header: false, existed })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn lock_exclusively(file: &File) -> io::Result<()> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        // Not every file system and device supports locks.
        Err(rustix::io::Errno::WOULDBLOCK) => {
            Err(io::Error::other("another whylate is recording to it (choose another file)"))
        }
        _ => Ok(()),
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        // No frame was written.
        if !self.has_header && !self.existed {
            files::remove_if_same(&self.file, &self.path);
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
        // A frame's data must be on disk before its index.
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
        // Cuts off what a discarded frame has left.
        self.file.set_len(self.end)?;
        self.file.sync_all()
    }

    fn discard_frame(&mut self) {
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
