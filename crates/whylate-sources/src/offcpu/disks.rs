// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests in flight of each disk (Documentation/block/stat.rst). The kernel does not record their submitters.

use std::fs;
use std::path::Path;

use whylate_model::Series;

const DISKS: &str = "/sys/block";

/// Returns a series for each disk with requests in flight; `None` if sysfs does not show them.
pub(super) fn busy() -> Option<Vec<Series>> {
    busy_in(Path::new(DISKS))
}

fn busy_in(directory: &Path) -> Option<Vec<Series>> {
    let mut disks: Vec<Series> = fs::read_dir(directory)
        .ok()?
        .flatten()
        .filter_map(|disk| {
            let [reads, writes] = requests(&fs::read_to_string(disk.path().join("inflight")).ok()?)?;
            let name = disk.file_name().to_string_lossy().into_owned();
            (reads + writes > 0).then(|| Series {
                labels: [("disk".to_owned(), name)].into(),
                values: [
                    ("reads_in_progress".to_owned(), reads as f64),
                    ("writes_in_progress".to_owned(), writes as f64),
                ]
                .into(),
                ..Series::default()
            })
        })
        .collect();
    disks.sort_by(|a, b| a.labels.cmp(&b.labels));
    Some(disks)
}

/// Parses `       1       12`: reads and writes.
fn requests(text: &str) -> Option<[u64; 2]> {
    let mut numbers = text.split_ascii_whitespace().map(|word| word.parse::<u32>().ok());
    Some([numbers.next()??.into(), numbers.next()??.into()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_only_disks_with_requests_in_flight() {
        let directory = tempfile::tempdir().expect("a directory");
        for (disk, text) in
            [("vda", "       1       12\n"), ("sr0", "0 0\n"), ("sda", "0 3"), ("odd", "x"), ("none", "")]
        {
            fs::create_dir(directory.path().join(disk)).expect("a directory");
            fs::write(directory.path().join(disk).join("inflight"), text).expect("a file");
        }
        let busy = busy_in(directory.path()).expect("it can be read");
        let counts = |series: &Series| {
            (series.labels["disk"].clone(), series.values["reads_in_progress"], series.values["writes_in_progress"])
        };
        assert_eq!(
            busy.iter().map(counts).collect::<Vec<_>>(),
            [("sda".to_owned(), 0.0, 3.0), ("vda".to_owned(), 1.0, 12.0)]
        );
        assert!(busy_in(Path::new("/nowhere")).is_none());
    }
}
