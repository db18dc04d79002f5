// SPDX-License-Identifier: MIT OR Apache-2.0
//! Directories and texts of `/proc`.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;

/// Returns the entries of a directory that are numbers, such as PIDs and descriptors.
pub(crate) fn numbers(directory: &Path) -> io::Result<Vec<u32>> {
    Ok(numbers_in(fs::read_dir(directory)?).collect())
}

/// Reads such entries on demand, as a process may have very many descriptors. A directory that cannot be read has none.
pub(crate) fn numbers_on_demand(directory: impl AsRef<Path>) -> impl Iterator<Item = u32> {
    fs::read_dir(directory).into_iter().flat_map(numbers_in)
}

fn numbers_in(entries: fs::ReadDir) -> impl Iterator<Item = u32> {
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// Reads a text. Names in it may have any bytes: `comm` is cut within a character, and users name their threads, cgroups
/// and mount points. What is not UTF-8 is replaced.
pub(crate) fn text(path: impl AsRef<Path>) -> io::Result<String> {
    let bytes = fs::read(path)?;
    Ok(String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

/// Reads at most `max_bytes` of a text.
pub(crate) fn text_at_most(path: impl AsRef<Path>, max_bytes: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(max_bytes).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files of `/proc` without a name that a user chooses.
    const WITHOUT_NAMES: [&str; 14] = [
        "/proc/stat",
        "/proc/loadavg",
        "/proc/kallsyms",
        "/proc/sys/",
        "/proc/self/timens_offsets",
        "/proc/filesystems",
        "/proc/self/fdinfo",
        "/stack",
        "/syscall",
        "/children",
        "/schedstat",
        "\"fdinfo\"",
        "/proc/modules",
        "/proc/self/statm",
    ];

    #[test]
    fn text_with_other_bytes_is_read() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), b"7 (\xff\xc3) S 1\n").expect("written");
        assert_eq!(text(file.path()).expect("read"), "7 (\u{fffd}\u{fffd}) S 1\n");
    }

    /// A thread named `\xff` would be read as if it were not there.
    #[test]
    fn no_text_with_names_must_be_utf8() {
        let mut left = Vec::new();
        let mut directories = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(directory).expect("a directory").flatten() {
                let path = entry.path();
                if path.is_dir() {
                    directories.push(path);
                    continue;
                }
                let source = fs::read_to_string(&path).expect("text");
                // Tests come last, and read what they made themselves.
                let code = source.split("#[cfg(test)]").next().unwrap_or_default();
                let is_of_proc = |line: &&str| {
                    line.contains("/proc/")
                        || ["comm", "stat", "status", "cgroup"]
                            .iter()
                            .any(|name| line.contains(&format!("join(\"{name}\")")))
                };
                let reads = code.lines().filter(|line| line.contains("read_to_string(")).filter(is_of_proc);
                let reads = reads.filter(|line| !WITHOUT_NAMES.iter().any(|known| line.contains(known)));
                left.extend(reads.map(|line| format!("{}: {}", path.display(), line.trim())));
            }
        }
        assert!(left.is_empty(), "use proc::text: {left:#?}");
    }
}
