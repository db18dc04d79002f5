// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parquet tables of many recordings in one directory: `date=2026-11-26/host=web1/causes-RECORDING.parquet`.
//!
//! Hive, Spark, DuckDB and ClickHouse read `date` and `host` from the path. A row is in the partition of its own day (UTC). A
//! file's name follows from the header and the first row of its recording, so that a second export of a recording replaces the
//! first one. Files are replaced at the end, when all are written: a failed export changes nothing.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::{Context as _, bail};
use sha2::{Digest as _, Sha256};
use whylate_model::name::cut;
use whylate_model::recording::Header;
use whylate_model::units::rfc3339;

use super::Destination;
use super::parquet::Files;
use super::tables::{Cell, Column, Kind, Row, Sink, Table};
use crate::files::PendingFile;

/// Partitions to which rows are written. Around midnight, rows of two days alternate.
const MAX_OPEN: usize = 2;
/// Partitions of one export: almost three years of days. Only a recording with a wrong clock has more. The files of each stay open
/// until the end of the export.
const MAX_PARTITIONS: usize = 1_000;
/// Length of a host's name, as in Linux (`HOST_NAME_MAX`), in bytes.
const MAX_HOST_BYTES: usize = 64;
/// What Hive writes for a value that is missing. Engines read it as NULL.
const UNKNOWN: &str = "__HIVE_DEFAULT_PARTITION__";
/// The column that is in the path instead.
const HOST: &str = "host";
/// Columns of the first row that distinguish recordings with the same header, such as those imported from traces without
/// dates.
const IDENTIFYING: [&str; 7] = ["source", "start", "duration_ns", "probe_run_ns", "probe_runs", "reason", "count"];
const DAY_NS: u64 = 86_400_000_000_000;

/// Writes each row to the files of its day.
pub struct Partitions {
    destination: Destination,
    directory: PathBuf,
    host: String,
    recording: Recording,
    /// Least recently used first.
    open: VecDeque<Partition>,
    /// Files with all their rows, which appear at the end.
    complete: Vec<PendingFile>,
    /// Number of times that the files of a recording and day were started, by host, recording and day.
    begun: BTreeMap<(String, String, u64), u32>,
    partitions: usize,
}

struct Partition {
    /// Days since 1970.
    day: u64,
    files: Box<Files>,
}

/// Name of a recording, which distinguishes it from all others of its host.
enum Recording {
    /// Before the first row is written: the start of the recording, and a hash of the header.
    Begins {
        start: String,
        hash: Sha256,
    },
    Named(String),
}

impl Recording {
    fn begin(header: &Header) -> Self {
        let Header { host, boot_id, kernel, cpus, every_ns, .. } = header;
        let mut hash = Sha256::new_with_prefix(format!("{host}\0{boot_id}\0{kernel}\0{cpus}\0{every_ns:?}\0"));
        for source in &header.sources {
            hash.update(format!("{}\0{}\0", source.source, source.backend));
        }
        let start = rfc3339::format(header.start_unix_ns).replace(['-', ':'], "");
        Recording::Begins { start, hash }
    }

    /// Returns the name: the start, and the hash of the header and the first row. `row` is the first one if there is no name yet.
    fn name(&mut self, row: &Row<'_>) -> String {
        if let Recording::Begins { start, hash } = self {
            let mut hash = hash.clone();
            for (column, cell) in row.iter().filter(|(column, _)| IDENTIFYING.contains(column)) {
                let value = match cell {
                    Cell::Text(text) => text.as_deref().unwrap_or_default().to_owned(),
                    Cell::Count(number) | Cell::Stamp(number) => number.unwrap_or_default().to_string(),
                    Cell::Number(_) | Cell::Flag(_) => continue,
                };
                hash.update(format!("{column}\0{value}\0"));
            }
            let hash: String = hash.finalize().iter().take(4).map(|byte| format!("{byte:02x}")).collect();
            *self = Recording::Named(format!("{start}-{hash}"));
        }
        match self {
            Recording::Named(name) => name.clone(),
            Recording::Begins { start, .. } => start.clone(),
        }
    }
}

/// Returns a value as a part of a path, with all but letters, digits, `.`, `_` and `-` percent-encoded, as Hive and DuckDB do.
fn path_value(text: &str) -> String {
    let mut value = String::new();
    for byte in cut(text.to_owned(), MAX_HOST_BYTES).bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'_' | b'-' => value.push(byte.into()),
            _ => value += &format!("%{byte:02X}"),
        }
    }
    if value.is_empty() { UNKNOWN.to_owned() } else { value }
}

/// Returns the columns of a table: those of an export without partitions and `recording`, but not the host.
fn columns(table: Table) -> Vec<Column> {
    let recording = Column { name: "recording", kind: Kind::Text };
    let others = table.columns().into_iter().filter(|column| column.name != HOST);
    std::iter::once(recording).chain(others).collect()
}

/// Returns the name of the column that decides on the partition.
fn time_column(table: Table) -> &'static str {
    match table {
        Table::Late | Table::Causes | Table::Path => "ended",
        Table::Snapshots | Table::Series | Table::Buckets | Table::Stacks | Table::Lost => "start",
    }
}

impl Partitions {
    /// Prepares to write the tables of a recording below a directory.
    pub fn new(destination: Destination, directory: &Path, header: &Header) -> Self {
        Partitions {
            destination,
            directory: directory.to_owned(),
            host: path_value(&header.host),
            recording: Recording::begin(header),
            open: VecDeque::new(),
            complete: Vec::new(),
            begun: BTreeMap::new(),
            partitions: 0,
        }
    }

    /// Returns the files of a recording's day, the last ones of `open`.
    fn files(&mut self, recording: &str, day: u64) -> anyhow::Result<&mut Files> {
        let partition = match self.open.iter().position(|partition| partition.day == day) {
            Some(at) => self.open.remove(at),
            None => None,
        };
        let partition = match partition {
            Some(partition) => partition,
            None => self.begin(recording, day)?,
        };
        self.open.push_back(partition);
        match self.open.back_mut() {
            Some(partition) => Ok(&mut partition.files),
            None => bail!("no partition is open"),
        }
    }

    fn begin(&mut self, recording: &str, day: u64) -> anyhow::Result<Partition> {
        while self.open.len() >= MAX_OPEN
            && let Some(oldest) = self.open.pop_front()
        {
            self.complete.extend(oldest.files.complete()?);
        }
        self.partitions += 1;
        if self.partitions > MAX_PARTITIONS {
            bail!("its timestamps span more than {MAX_PARTITIONS} days (export it without --partition)");
        }
        let date = rfc3339::format(day.saturating_mul(DAY_NS)).chars().take(10).collect::<String>();
        let directory = self.directory.join(format!("date={date}"));
        super::open_directory_of_export(&self.directory)?;
        super::open_directory_below(&directory)?;
        let directory = directory.join(format!("host={}", self.host));
        super::open_directory_below(&directory)?;
        // The clock was set back to a day whose files have ended.
        let begun = self.begun.entry((self.host.clone(), recording.to_owned(), day)).or_default();
        *begun += 1;
        let part = if *begun > 1 { format!(".{begun}") } else { String::new() };
        let suffix = format!("-{recording}{part}");
        let files = self.destination.tables(&directory, &suffix, "parquet")?;
        Ok(Partition { day, files: Box::new(Files::begin(files, columns)?) })
    }

    fn complete_all(&mut self) -> anyhow::Result<()> {
        for partition in self.open.drain(..) {
            self.complete.extend(partition.files.complete()?);
        }
        Ok(())
    }

    /// Removes files that an earlier export of the same recordings wrote and this one did not, such as those of a day to which
    /// an older whylate assigned rows.
    fn remove_former(&self, made: &BTreeSet<PathBuf>) -> anyhow::Result<()> {
        let recordings: BTreeSet<(&str, &str)> =
            self.begun.keys().map(|(host, recording, _)| (host.as_str(), recording.as_str())).collect();
        let dates = directories_in(&self.directory)?.into_iter().filter(|path| name_of(path).starts_with("date="));
        for date in dates {
            for directory in directories_in(&date)? {
                let name = name_of(&directory).strip_prefix("host=").unwrap_or_default();
                if !recordings.iter().any(|(host, _)| *host == name) {
                    continue;
                }
                for entry in fs::read_dir(&directory)? {
                    let entry = entry?;
                    let path = entry.path();
                    let recording = recording_of(name_of(&path)).unwrap_or_default();
                    if recordings.contains(&(name, recording)) && entry.file_type()?.is_file() && !made.contains(&path)
                    {
                        fs::remove_file(&path)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Lists the directories in a directory, without symbolic links.
fn directories_in(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut directories = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            directories.push(entry.path());
        }
    }
    Ok(directories)
}

/// Returns the last part of a path; empty if it is not UTF-8, and so not a name that an export wrote.
fn name_of(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// Returns the name of the recording in the name of a file: `R` in `causes-R.parquet` and `causes-R.2.parquet`.
fn recording_of(file: &str) -> Option<&str> {
    let (table, rest) = file.strip_suffix(".parquet")?.split_once('-')?;
    let rest = rest.rsplit_once('.').filter(|(_, part)| part.parse::<u32>().is_ok()).map_or(rest, |(name, _)| name);
    Table::ALL.iter().any(|one| one.name() == table).then_some(rest)
}

impl Sink for Partitions {
    fn begin_recording(&mut self, header: &Header) -> anyhow::Result<()> {
        self.complete_all()?;
        self.recording = Recording::begin(header);
        self.host = path_value(&header.host);
        Ok(())
    }

    fn add(&mut self, table: Table, row: Row<'_>) -> anyhow::Result<()> {
        let name = time_column(table);
        let at_unix_ns = match row.iter().find(|(column, _)| *column == name) {
            Some((_, Cell::Stamp(Some(unix_ns)))) => *unix_ns,
            _ => bail!("a row of {} has no time", table.name()),
        };
        let recording = self.recording.name(&row);
        let others = row.into_iter().filter(|(column, _)| *column != HOST);
        let first = ("recording", Cell::Text(Some(recording.as_str().into())));
        let row: Row<'_> = std::iter::once(first).chain(others).collect();
        self.files(&recording, at_unix_ns / DAY_NS)?.add(table, row)
    }

    fn end(mut self: Box<Self>) -> anyhow::Result<()> {
        self.complete_all()?;
        // All writes, which can fail for lack of space, are done before the first file is replaced.
        self.complete.iter_mut().try_for_each(PendingFile::settle)?;
        let complete = std::mem::take(&mut self.complete);
        let made: BTreeSet<PathBuf> = complete.iter().map(|file| file.path().to_owned()).collect();
        complete.into_iter().try_for_each(PendingFile::end)?;
        self.remove_former(&made).context("cannot remove files of a former export of the recording")
    }
}

#[cfg(test)]
mod tests {
    use whylate_model::recording::Measured;

    use super::*;

    #[test]
    fn hostile_host_names_stay_one_part_of_a_path() {
        for (name, value) in [
            ("web1", "web1"),
            ("web-1.example.com", "web-1.example.com"),
            ("", UNKNOWN),
            ("../../etc", "..%2F..%2Fetc"),
            ("a/host=b", "a%2Fhost%3Db"),
            ("%2F*?[x]{a,b}'\"", "%252F%2A%3F%5Bx%5D%7Ba%2Cb%7D%27%22"),
            ("\u{1b}[2J\n\0", "%1B%5B2J%0A%00"),
            ("ü", "%C3%BC"),
        ] {
            assert_eq!(path_value(name), value);
        }
        let long = path_value(&"ü".repeat(10_000));
        assert!(long.len() <= 3 * MAX_HOST_BYTES, "{long}");
    }

    #[test]
    fn recordings_have_names_of_their_own() {
        let header = |host: &str, boot_id: &str, start_unix_ns| Header {
            host: host.to_owned(),
            boot_id: boot_id.to_owned(),
            start_unix_ns,
            ..Header::default()
        };
        let named = |header: Header, first: u64| Recording::begin(&header).name(&row(first));
        let start_unix_ns = 1_795_687_200_000_000_000;
        let one = named(header("web1", "a", start_unix_ns), 1);
        assert!(one.starts_with("20261126T100000.000") && !one.contains([':', '/']), "{one}");
        assert_eq!(one, named(header("web1", "a", start_unix_ns), 1));
        let sources = vec![Measured { source: "block".to_owned(), ..Measured::default() }];
        let others = [
            named(header("web1", "b", start_unix_ns), 1),
            named(header("web2", "a", start_unix_ns), 1),
            named(header("web1", "a", start_unix_ns + 1_000_000), 1),
            // Two recordings that started at the same time, and two imported traces without dates.
            named(Header { sources, ..header("web1", "a", start_unix_ns) }, 1),
            named(header("web1", "a", start_unix_ns), 2),
        ];
        assert!(others.iter().all(|other| *other != one), "{one}: {others:?}");
        // Later rows do not change the name: a recording keeps it while it grows.
        let mut recording = Recording::begin(&header("web1", "a", start_unix_ns));
        assert_eq!([1, 2].map(|day| recording.name(&row(day))), [one.clone(), one]);
    }

    /// Returns a row of the table of lost events at the start of a day.
    fn row(day: u64) -> Row<'static> {
        let cell = |column: &Column| match column.kind {
            Kind::Stamp => Cell::Stamp(Some(day * DAY_NS)),
            Kind::Text => Cell::Text(None),
            Kind::Count => Cell::Count(None),
            Kind::Number => Cell::Number(None),
            Kind::Flag => Cell::Flag(None),
        };
        Table::Lost.columns().iter().map(|column| (column.name, cell(column))).collect()
    }

    #[test]
    fn clock_that_goes_back_keeps_few_files_open_and_loses_none() {
        let directory = tempfile::tempdir().expect("a directory");
        let header = Header { host: "web1".to_owned(), ..Header::default() };
        let mut partitions = Partitions::new(Destination { recording: (0, 0) }, directory.path(), &header);
        for day in [1, 2, 1, 3, 2, 4, 1] {
            partitions.add(Table::Lost, row(day)).expect("a row");
            assert!(partitions.open.len() <= MAX_OPEN);
        }
        Box::new(partitions).end().expect("all is written");
        let written = |date: &str| {
            let directory = directory.path().join(format!("date={date}/host=web1"));
            let names = std::fs::read_dir(directory).expect("a partition").flatten();
            let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
            let mut names: Vec<String> = names.filter(|name| name.starts_with("lost-")).collect();
            names.sort();
            names
        };
        // Day 2 was closed for day 3, and day 1 for day 2: what came later is in files of its own.
        assert_eq!(written("1970-01-02").len(), 2);
        assert_eq!(written("1970-01-03").len(), 2);
        assert_eq!(written("1970-01-04").len(), 1);
        assert_eq!(written("1970-01-05").len(), 1);
        assert!(written("1970-01-03")[1].ends_with(".parquet") && written("1970-01-03")[0].ends_with(".2.parquet"));
    }

    /// Returns the files below a directory with their inode numbers, which a replacement changes.
    fn files_in(directory: &Path) -> BTreeMap<String, u64> {
        use std::os::unix::fs::MetadataExt as _;
        let mut files = BTreeMap::new();
        for date in directories_in(directory).expect("readable") {
            for entry in fs::read_dir(date.join("host=web1")).expect("a partition").flatten() {
                let name = format!("{}/{}", name_of(&date), entry.file_name().to_string_lossy());
                files.insert(name, entry.metadata().expect("there").ino());
            }
        }
        files
    }

    #[test]
    fn failed_export_changes_nothing_and_another_one_replaces_all() {
        let directory = tempfile::tempdir().expect("a directory");
        let header = Header { host: "web1".to_owned(), ..Header::default() };
        let export = |days: &[u64]| {
            let mut partitions = Partitions::new(Destination { recording: (0, 0) }, directory.path(), &header);
            days.iter().for_each(|day| partitions.add(Table::Lost, row(*day)).expect("a row"));
            Box::new(partitions)
        };
        // Day 1 gets two parts.
        export(&[1, 2, 3, 1]).end().expect("written");
        let before = files_in(directory.path());
        assert_eq!(before.len(), 4 * Table::ALL.len());
        let mut fails = export(&[1, 2, 3, 4]);
        let without_time = row(5).into_iter().filter(|(column, _)| *column != "start").collect();
        assert!(fails.add(Table::Lost, without_time).is_err());
        drop(fails);
        assert!(directory.path().join("date=1970-01-05/host=web1").exists(), "it began to write");
        assert_eq!(files_in(directory.path()), before);
        let other = directory.path().join("date=1970-01-02/host=web1/lost-19700101T000000.000000Z-00000000.parquet");
        fs::write(&other, "of another recording").expect("written");
        export(&[1, 2]).end().expect("written");
        let after = files_in(directory.path());
        assert_eq!(after.len(), 2 * Table::ALL.len() + 1, "{after:?}");
        assert!(other.exists() && !after.keys().any(|name| name.contains("01-04") || name.contains(".2.parquet")));
        assert!(after.iter().all(|(name, inode)| before.get(name) != Some(inode)), "all are new");
    }

    #[test]
    fn each_table_has_a_time_and_no_host() {
        for table in Table::ALL {
            let columns = columns(table);
            let is_time = |column: &Column| column.name == time_column(table) && column.kind == Kind::Stamp;
            assert!(columns.iter().any(is_time), "{}: {columns:?}", table.name());
            assert!(columns.iter().all(|column| column.name != HOST && column.name != "date"), "{columns:?}");
        }
    }
}
