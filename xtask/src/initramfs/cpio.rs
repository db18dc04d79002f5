// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes an archive in the kernel's initramfs format ("newc"), uncompressed: decompression costs the emulator more
//! than copying.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;
const ALIGN: usize = 4;
const TRAILER: &str = "TRAILER!!!";

/// Entries by their path in the archive.
#[derive(Debug, Default)]
pub struct Archive {
    // Sorted, so that a directory precedes its contents.
    entries: BTreeMap<PathBuf, Entry>,
}

#[derive(Debug)]
enum Entry {
    Directory,
    Text(String),
    Copy(PathBuf),
    Link(PathBuf),
}

impl Archive {
    pub fn directory(&mut self, path: impl AsRef<Path>) {
        let path = path.as_ref();
        if let Some(parent) = path.parent() {
            self.directory(parent);
        }
        if path.file_name().is_some() {
            self.entries.entry(path.to_owned()).or_insert(Entry::Directory);
        }
    }

    fn add(&mut self, path: &Path, entry: Entry) {
        if let Some(parent) = path.parent() {
            self.directory(parent);
        }
        self.entries.insert(path.to_owned(), entry);
    }

    /// Adds an executable text file.
    pub fn script(&mut self, path: &str, text: String) {
        self.add(Path::new(path), Entry::Text(text));
    }

    /// Adds an executable copy of a file of the host.
    pub fn copy(&mut self, path: impl AsRef<Path>, from: &Path) {
        self.add(path.as_ref(), Entry::Copy(from.to_owned()));
    }

    pub fn link(&mut self, path: &str, to: &str) {
        self.add(Path::new(path), Entry::Link(PathBuf::from(to)));
    }

    pub fn has(&self, path: &Path) -> bool {
        self.entries.contains_key(path)
    }

    pub fn write(&self, to: &mut impl Write) -> Result<()> {
        for (number, (path, entry)) in (1..).zip(&self.entries) {
            let (mode, content) = match entry {
                Entry::Directory => (DIRECTORY, Vec::new()),
                Entry::Text(text) => (PROGRAM, text.clone().into_bytes()),
                Entry::Copy(from) => {
                    (PROGRAM, fs::read(from).with_context(|| format!("cannot read {}", from.display()))?)
                }
                Entry::Link(target) => (LINK, target.as_os_str().as_bytes().to_owned()),
            };
            let name = path.strip_prefix("/").unwrap_or(path).as_os_str().as_bytes();
            member(to, number, mode, name, &content)?;
        }
        Ok(member(to, 0, 0, TRAILER.as_bytes(), &[])?)
    }
}

fn member(to: &mut impl Write, number: u32, mode: u32, name: &[u8], content: &[u8]) -> io::Result<()> {
    let size = u32::try_from(content.len()).map_err(|_| io::Error::other("a file is too large for the archive"))?;
    let links = if mode == DIRECTORY { 2 } else { 1 };
    let name_size = name.len() as u32 + 1;
    // Inode, mode, UID, GID, links, mtime, size, two device numbers twice, length of the name, checksum.
    let fields = [number, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0];
    let head: String = fields.iter().map(|field| format!("{field:08x}")).collect();
    let head = format!("070701{head}");
    to.write_all(head.as_bytes())?;
    to.write_all(name)?;
    to.write_all(&[0])?;
    pad(to, head.len() + name.len() + 1)?;
    to.write_all(content)?;
    pad(to, content.len())
}

fn pad(to: &mut impl Write, written: usize) -> io::Result<()> {
    to.write_all(&[0; ALIGN][..written.next_multiple_of(ALIGN) - written])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archive_has_newc_format() -> Result<()> {
        let mut archive = Archive::default();
        archive.script("/etc/greeting", "hello".to_owned());
        archive.link("/bin/sh", "busybox");
        archive.directory("/bin/sub");
        let mut bytes = Vec::new();
        archive.write(&mut bytes)?;
        let text = String::from_utf8(bytes)?;

        assert_eq!(text.len() % ALIGN, 0);
        let mut members = Vec::new();
        let mut at = 0;
        loop {
            let field = |index: usize| {
                let digits = &text[at + 6 + index * 8..at + 14 + index * 8];
                usize::from_str_radix(digits, 16).unwrap_or(usize::MAX)
            };
            assert_eq!(&text[at..at + 6], "070701");
            let (mode, size, name_size) = (field(1), field(6), field(11));
            let name = &text[at + 110..at + 110 + name_size - 1];
            let content_at = at + (110 + name_size).next_multiple_of(ALIGN);
            if name == TRAILER {
                break;
            }
            members.push((name, mode, &text[content_at..content_at + size]));
            at = content_at + size.next_multiple_of(ALIGN);
        }
        assert_eq!(
            members,
            [
                ("bin", 0o040_755, ""),
                ("bin/sh", 0o120_777, "busybox"),
                ("bin/sub", 0o040_755, ""),
                ("etc", 0o040_755, ""),
                ("etc/greeting", 0o100_755, "hello"),
            ]
        );
        Ok(())
    }
}
