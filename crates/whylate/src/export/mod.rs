// SPDX-License-Identifier: MIT OR Apache-2.0
//! A recording in the forms of other programs: traces for Perfetto, tables for SQL engines.

mod csv;
#[cfg(feature = "parquet")]
mod parquet;
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
use tables::{Sink, Table, Tabled};

/// Takes the lines of a recording as they come, and keeps none of them.
pub trait Export {
    /// Takes the next line.
    ///
    /// # Errors
    /// When it cannot be written.
    fn line(&mut self, line: &Line) -> anyhow::Result<()>;

    /// There is no other one.
    ///
    /// # Errors
    /// When the rest cannot be written.
    fn end(self: Box<Self>) -> anyhow::Result<()>;
}

/// Where an export goes. What is read is not written over.
pub struct Place {
    recording: (u64, u64),
}

impl Place {
    /// For what is made of that file.
    ///
    /// # Errors
    /// When it is not there.
    pub fn beside(recording: &Path) -> io::Result<Self> {
        let about = fs::metadata(recording)?;
        Ok(Place { recording: (about.dev(), about.ino()) })
    }

    /// Any one file.
    ///
    /// # Errors
    /// When it cannot be made, or is the recording.
    pub fn begin(&self, path: &Path) -> anyhow::Result<PendingFile> {
        let name = printable(&path.to_string_lossy());
        if fs::metadata(path).is_ok_and(|about| (about.dev(), about.ino()) == self.recording) {
            bail!("cannot write {name}: it is the recording itself (choose another file)");
        }
        PendingFile::new(path).with_context(|| format!("cannot write {name}"))
    }

    /// A file of packets, for ui.perfetto.dev.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn perfetto(&self, path: &Path, header: &Header) -> anyhow::Result<Box<dyn Export>> {
        Ok(Box::new(perfetto::Trace::begin(self.begin(path)?, header)?))
    }

    /// A folder of CSV files.
    ///
    /// # Errors
    /// When they cannot be made.
    pub fn csv(&self, folder: &Path) -> anyhow::Result<Box<dyn Export>> {
        let files = self.tables(folder, "csv")?;
        Ok(Box::new(Tabled::new(Box::new(csv::Files::begin(files)?))))
    }

    /// A folder of Parquet files.
    ///
    /// # Errors
    /// When they cannot be made.
    pub fn parquet(&self, folder: &Path) -> anyhow::Result<Box<dyn Export>> {
        Ok(Box::new(Tabled::new(self.parquet_sink(folder)?)))
    }

    #[cfg(feature = "parquet")]
    fn parquet_sink(&self, folder: &Path) -> anyhow::Result<Box<dyn Sink>> {
        Ok(Box::new(parquet::Files::begin(self.tables(folder, "parquet")?)?))
    }

    #[cfg(not(feature = "parquet"))]
    fn parquet_sink(&self, _folder: &Path) -> anyhow::Result<Box<dyn Sink>> {
        bail!("this whylate was built without Parquet (use --csv, or build it with --features parquet)")
    }

    /// A file for each table.
    fn tables(&self, folder: &Path, extension: &str) -> anyhow::Result<Vec<PendingFile>> {
        open_folder(folder).with_context(|| format!("cannot write to {}", printable(&folder.to_string_lossy())))?;
        let path = |table: &Table| -> PathBuf { folder.join(format!("{}.{extension}", table.name())) };
        Table::ALL.iter().map(|table| self.begin(&path(table))).collect()
    }
}

/// Makes the folder if it is not there, for its owner alone.
fn open_folder(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // In somebody else's, files could be swapped while they are written.
    match fs::metadata(folder)?.uid() == geteuid().as_raw() {
        true => Ok(()),
        false => Err(io::Error::other("it belongs to another user (choose another folder)")),
    }
}
