// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parquet tables of many recordings in one directory: `date=2026-11-26/host=web1/causes-RECORDING.parquet`.
//!
//! Hive, Spark, DuckDB and ClickHouse read `date` and `host` from the path. A row is in the partition of its own day (UTC). A
//! file's name follows from the header of its recording, so that a second export of a recording replaces the first one.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};

use anyhow::bail;
use sha2::{Digest as _, Sha256};
use whylate_model::name::cut;
use whylate_model::recording::Header;
use whylate_model::units::rfc3339;

use super::Destination;
use super::parquet::Files;
use super::tables::{Cell, Column, Kind, Row, Sink, Table};

/// Partitions whose files are open. Around midnight, rows of two days alternate.
const MAX_OPEN: usize = 2;
/// Partitions of one export: ten years of days. Only a recording with a wrong clock has more.
const MAX_PARTITIONS: usize = 4_000;
/// Length of a host's name, as in Linux (`HOST_NAME_MAX`), in bytes.
const MAX_HOST_BYTES: usize = 64;
/// What Hive writes for a value that is missing. Engines read it as NULL.
const UNKNOWN: &str = "__HIVE_DEFAULT_PARTITION__";
/// The column that is in the path instead.
const HOST: &str = "host";
const DAY_NS: u64 = 86_400_000_000_000;

/// Writes each row to the files of its day.
pub struct Partitions {
    destination: Destination,
    directory: PathBuf,
    recording: Identity,
    /// Least recently used first.
    open: VecDeque<Partition>,
    /// Number of times that the files of a recording and day were started, by the recording's name and the day.
    begun: BTreeMap<(String, u64), u32>,
    partitions: usize,
}

struct Partition {
    /// Days since 1970.
    day: u64,
    files: Box<Files>,
}

/// What distinguishes a recording from all others.
struct Identity {
    /// Name of the host, as a part of a path.
    host: String,
    /// Start of the recording and a hash of its host and boot.
    name: String,
}

impl Identity {
    fn of(header: &Header) -> Self {
        let hash = Sha256::digest(format!("{}\0{}", header.host, header.boot_id));
        let hash: String = hash.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
        let start = rfc3339::format(header.start_unix_ns).replace(['-', ':'], "");
        Identity { host: path_value(&header.host), name: format!("{start}-{hash}") }
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
            recording: Identity::of(header),
            open: VecDeque::new(),
            begun: BTreeMap::new(),
            partitions: 0,
        }
    }

    /// Returns the files of a day, the last ones of `open`.
    fn files(&mut self, day: u64) -> anyhow::Result<&mut Files> {
        let partition = match self.open.iter().position(|partition| partition.day == day) {
            Some(at) => self.open.remove(at),
            None => None,
        };
        let partition = match partition {
            Some(partition) => partition,
            None => self.begin(day)?,
        };
        self.open.push_back(partition);
        match self.open.back_mut() {
            Some(partition) => Ok(&mut partition.files),
            None => bail!("no partition is open"),
        }
    }

    fn begin(&mut self, day: u64) -> anyhow::Result<Partition> {
        while self.open.len() >= MAX_OPEN
            && let Some(oldest) = self.open.pop_front()
        {
            oldest.files.end()?;
        }
        self.partitions += 1;
        if self.partitions > MAX_PARTITIONS {
            bail!("its timestamps span more than {MAX_PARTITIONS} days (export it without --partition)");
        }
        let date = rfc3339::format(day.saturating_mul(DAY_NS)).chars().take(10).collect::<String>();
        let directory = self.directory.join(format!("date={date}"));
        super::open_directory_of_export(&self.directory)?;
        super::open_directory_below(&directory)?;
        let directory = directory.join(format!("host={}", self.recording.host));
        super::open_directory_below(&directory)?;
        // The clock was set back to a day whose files have ended.
        let begun = self.begun.entry((self.recording.name.clone(), day)).or_default();
        *begun += 1;
        let part = if *begun > 1 { format!(".{begun}") } else { String::new() };
        let suffix = format!("-{}{part}", self.recording.name);
        let files = self.destination.tables(&directory, &suffix, "parquet")?;
        Ok(Partition { day, files: Box::new(Files::begin(files, columns)?) })
    }

    fn end_all(&mut self) -> anyhow::Result<()> {
        self.open.drain(..).try_for_each(|partition| partition.files.end())
    }
}

impl Sink for Partitions {
    fn begin_recording(&mut self, header: &Header) -> anyhow::Result<()> {
        self.end_all()?;
        self.recording = Identity::of(header);
        Ok(())
    }

    fn add(&mut self, table: Table, row: Row<'_>) -> anyhow::Result<()> {
        let name = time_column(table);
        let at_unix_ns = match row.iter().find(|(column, _)| *column == name) {
            Some((_, Cell::Stamp(Some(unix_ns)))) => *unix_ns,
            _ => bail!("a row of {} has no time", table.name()),
        };
        let recording = Cell::Text(Some(self.recording.name.clone().into()));
        let others = row.into_iter().filter(|(column, _)| *column != HOST);
        let row: Row<'_> = std::iter::once(("recording", recording)).chain(others).collect();
        self.files(at_unix_ns / DAY_NS)?.add(table, row)
    }

    fn end(mut self: Box<Self>) -> anyhow::Result<()> {
        self.end_all()
    }
}

#[cfg(test)]
mod tests {
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
        let header = |host: &str, boot_id: &str, start_unix_ns| {
            Identity::of(&Header {
                host: host.to_owned(),
                boot_id: boot_id.to_owned(),
                start_unix_ns,
                ..Header::default()
            })
            .name
        };
        let one = header("web1", "a", 1_795_687_200_000_000_000);
        assert!(one.starts_with("20261126T100000.000") && !one.contains([':', '/']), "{one}");
        assert_eq!(one, header("web1", "a", 1_795_687_200_000_000_000));
        for other in [header("web1", "b", 1_795_687_200_000_000_000), header("web2", "a", 1_795_687_200_000_000_000)] {
            assert_ne!(one, other);
        }
        assert_ne!(one, header("web1", "a", 1_795_687_200_001_000_000));
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
