// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exports a recording for other programs: traces for Perfetto, tables for SQL engines.

mod csv;
#[cfg(feature = "parquet")]
mod parquet;
#[cfg(feature = "parquet")]
mod partition;
mod perfetto;
mod tables;

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use rustix::process::geteuid;
use whylate_model::recording::{Header, Line};
use whylate_model::units::printable;

use crate::files::PendingFile;
use tables::{Sink, Table, TableExport};

/// Writes the lines of a recording as they come, without keeping them.
pub trait Export {
    /// Writes a line.
    ///
    /// # Errors
    /// Fails if the line cannot be written.
    fn line(&mut self, line: &Line) -> anyhow::Result<()>;

    /// Finishes the export after the last line.
    ///
    /// # Errors
    /// Fails if the remaining data cannot be written.
    fn end(self: Box<Self>) -> anyhow::Result<()>;
}

/// Creates the files of an export. Refuses to overwrite the recording that is exported.
#[derive(Clone, Copy, Debug)]
pub struct Destination {
    recording: (u64, u64),
}

impl Destination {
    /// Prepares an export of a recording.
    ///
    /// # Errors
    /// Fails if the recording does not exist.
    pub fn for_recording(recording: &Path) -> io::Result<Self> {
        let about = fs::metadata(recording)?;
        Ok(Destination { recording: (about.dev(), about.ino()) })
    }

    /// Creates an output file.
    ///
    /// # Errors
    /// Fails if the file cannot be created, or is the recording.
    pub fn begin(&self, path: &Path) -> anyhow::Result<PendingFile> {
        let name = printable(&path.to_string_lossy());
        if fs::metadata(path).is_ok_and(|about| (about.dev(), about.ino()) == self.recording) {
            bail!("cannot write {name}: it is the recording itself (choose another file)");
        }
        PendingFile::new(path).with_context(|| format!("cannot write {name}"))
    }

    /// Starts a Perfetto trace, for ui.perfetto.dev.
    ///
    /// # Errors
    /// Fails if the file cannot be created.
    pub fn perfetto(&self, path: &Path, header: &Header) -> anyhow::Result<Box<dyn Export>> {
        Ok(Box::new(perfetto::Trace::begin(self.begin(path)?, header)?))
    }

    /// Starts a directory of CSV files.
    ///
    /// # Errors
    /// Fails if the files cannot be created.
    pub fn csv(&self, directory: &Path) -> anyhow::Result<Box<dyn Export>> {
        let files = self.tables(directory, "", "csv")?;
        Ok(Box::new(TableExport::new(Box::new(csv::Files::begin(files)?))))
    }

    /// Starts a directory of Parquet files.
    ///
    /// # Errors
    /// Fails if the files cannot be created, or without the `parquet` feature.
    pub fn parquet(&self, directory: &Path) -> anyhow::Result<Box<dyn Export>> {
        Ok(Box::new(TableExport::new(self.parquet_sink(directory)?)))
    }

    /// Starts Parquet files in `date=YYYY-MM-DD/host=NAME/` below a directory, which recordings of many hosts can share.
    ///
    /// # Errors
    /// Fails if the files cannot be created, or without the `parquet` feature.
    pub fn partitions(&self, directory: &Path, header: &Header) -> anyhow::Result<Box<dyn Export>> {
        open_directory_of_export(directory)?;
        Ok(Box::new(TableExport::new(self.partition_sink(directory, header)?)))
    }

    #[cfg(feature = "parquet")]
    fn partition_sink(&self, directory: &Path, header: &Header) -> anyhow::Result<Box<dyn Sink>> {
        Ok(Box::new(partition::Partitions::new(*self, directory, header)))
    }

    #[cfg(not(feature = "parquet"))]
    fn partition_sink(&self, directory: &Path, _header: &Header) -> anyhow::Result<Box<dyn Sink>> {
        self.parquet_sink(directory)
    }

    #[cfg(feature = "parquet")]
    fn parquet_sink(&self, directory: &Path) -> anyhow::Result<Box<dyn Sink>> {
        Ok(Box::new(parquet::Files::begin(self.tables(directory, "", "parquet")?, Table::columns)?))
    }

    #[cfg(not(feature = "parquet"))]
    fn parquet_sink(&self, _directory: &Path) -> anyhow::Result<Box<dyn Sink>> {
        bail!("this whylate was built without Parquet (use --csv, or build it with --features parquet)")
    }

    /// Creates a file for each table, named after it, with a suffix before the extension.
    fn tables(&self, directory: &Path, suffix: &str, extension: &str) -> anyhow::Result<Vec<PendingFile>> {
        open_directory_of_export(directory)?;
        let path = |table: &Table| -> PathBuf { directory.join(format!("{}{suffix}.{extension}", table.name())) };
        Table::ALL.iter().map(|table| self.begin(&path(table))).collect()
    }
}

/// Opens the directory, and names it if that fails.
fn open_directory_of_export(directory: &Path) -> anyhow::Result<()> {
    open_directory(directory).with_context(|| format!("cannot write to {}", printable(&directory.to_string_lossy())))
}

/// Opens a directory of a known name below the one of the export, which others may write to: no link is followed.
fn open_directory_below(directory: &Path) -> anyhow::Result<()> {
    open_directory_of_export(directory)?;
    match fs::symlink_metadata(directory)?.is_dir() {
        true => Ok(()),
        false => bail!("{} is no directory (remove it)", printable(&directory.to_string_lossy())),
    }
}

/// Creates the directory, accessible by its owner only, if it does not exist.
fn open_directory(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // In a directory of another user, files could be replaced while they are written.
    match fs::metadata(directory)?.uid() == geteuid().as_raw() {
        true => Ok(()),
        false => Err(io::Error::other("it belongs to another user (choose another directory)")),
    }
}
