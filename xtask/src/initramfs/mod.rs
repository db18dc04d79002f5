// SPDX-License-Identifier: MIT OR Apache-2.0
//! The initramfs of a virtual machine: busybox, whylate, other programs with their libraries, and the command.

mod cpio;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufWriter, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow};

use crate::host::{cannot_run, which};
use cpio::Archive;

/// Tools to compare with, included if installed.
const TOOLS: [&str; 5] = ["bpftrace", "cyclictest", "perf", "rtla", "trace-cmd"];

/// The first process. It puts busybox's commands last on the search path, as substitutes for missing programs.
const INIT: &str = include_str!("init.sh");

/// Contents of the initramfs.
pub struct Contents<'a> {
    pub busybox: PathBuf,
    /// The kernel's name of the serial line for the command.
    pub line: &'a str,
    pub whylate: Option<PathBuf>,
    /// Directory of the kernel's modules, if it has any.
    pub modules: Option<PathBuf>,
    /// Programs, files and directories of the host, by path; programs also by name.
    pub with: &'a [OsString],
    pub tools: bool,
    pub command: &'a [OsString],
    pub mark: &'a str,
}

pub fn write(contents: &Contents<'_>, to: impl Write) -> Result<()> {
    let mut archive = Archive::default();
    for directory in ["/dev", "/proc", "/sys", "/root", "/run", "/busybox", "/var/tmp"] {
        archive.directory(directory);
    }
    archive.copy("/bin/busybox", &contents.busybox);
    archive.link("/bin/sh", "busybox");
    archive.script("/init", init(contents.command, contents.line, contents.mark)?);
    archive.script("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n".to_owned());
    if let Some(whylate) = &contents.whylate {
        archive.copy("/usr/bin/whylate", whylate);
    }
    for module in contents.modules.iter().flat_map(fs::read_dir).flatten() {
        let module = module?;
        archive.copy(Path::new("/lib/modules").join(module.file_name()), &module.path());
    }
    for name in contents.with {
        let path = Path::new(name);
        let path = if path.components().count() > 1 { Some(path.to_owned()) } else { which(name) };
        let path = path.filter(|path| path.exists());
        let path = path.ok_or_else(|| anyhow!("there is no {}: give a path, or install it", name.to_string_lossy()))?;
        with_libraries(&mut archive, &std::path::absolute(&path)?)?;
    }
    for tool in TOOLS.iter().filter(|_| contents.tools).filter_map(|tool| which(OsStr::new(tool))) {
        with_libraries(&mut archive, &tool)?;
    }
    let mut to = BufWriter::new(to);
    archive.write(&mut to)?;
    Ok(to.flush()?)
}

/// Copies a file with its libraries, or all files of a directory, to their paths on the host.
fn with_libraries(archive: &mut Archive, path: &Path) -> Result<()> {
    if path.is_dir() {
        for entry in fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))? {
            with_libraries(archive, &entry?.path())?;
        }
        return Ok(());
    }
    archive.copy(path, path);
    let mut magic = [0; 4];
    let length = fs::File::open(path).and_then(|mut file| file.read(&mut magic));
    if length.with_context(|| format!("cannot read {}", path.display()))? < 4 || magic != *b"\x7fELF" {
        return Ok(());
    }
    // Fails for a static program.
    let libraries = Command::new("ldd").arg(path).stdin(Stdio::null()).stderr(Stdio::null()).output();
    let libraries = libraries.map_err(|error| cannot_run("ldd", error))?;
    for word in libraries.stdout.split(u8::is_ascii_whitespace).filter(|word| word.first() == Some(&b'/')) {
        let library = Path::new(OsStr::from_bytes(word));
        if library.is_file() && !archive.has(library) {
            archive.copy(library, library);
        }
    }
    Ok(())
}

fn init(command: &[OsString], line: &str, mark: &str) -> Result<String> {
    let command: Vec<Vec<u8>> = command.iter().map(|word| quoted(word)).collect();
    let command = OsString::from_vec(command.join(&b' '));
    let command = command.into_string().map_err(|_| anyhow!("the command has to be UTF-8"))?;
    Ok(INIT.replace("@LINE@", line).replace("@MARK@", mark).replace("@COMMAND@", &command))
}

/// Quotes a word for the shell.
fn quoted(word: &OsStr) -> Vec<u8> {
    let mut quoted = vec![b'\''];
    for &byte in word.as_bytes() {
        match byte {
            b'\'' => quoted.extend_from_slice(b"'\\''"),
            _ => quoted.push(byte),
        }
    }
    quoted.push(b'\'');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_reads_quoted_words_verbatim() -> Result<()> {
        let words = ["printf", "%s|", "two words", "it's", "$HOME `id` \"x\"", "", "a\nb", "\\", "*", "#"];
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        let line: Vec<Vec<u8>> = words.iter().map(|word| quoted(word)).collect();
        let output = Command::new("sh").arg("-c").arg(OsString::from_vec(line.join(&b' '))).output()?;
        assert_eq!(String::from_utf8(output.stdout)?, "two words|it's|$HOME `id` \"x\"||a\nb|\\|*|#|");
        Ok(())
    }

    #[test]
    fn command_occurs_once_in_init() -> Result<()> {
        let init = init(&["one\ntwo".into()], "ttyS1", "the mark")?;
        assert_eq!((init.matches("'one\ntwo'").count(), init.matches("the mark").count()), (1, 1));
        Ok(())
    }

    #[test]
    fn program_brings_its_libraries() -> Result<()> {
        let mut archive = Archive::default();
        let program = std::env::current_exe()?;
        with_libraries(&mut archive, &program)?;
        assert!(archive.has(&program));
        let mut bytes = Vec::new();
        archive.write(&mut bytes)?;
        let has = |name: &[u8]| bytes.windows(name.len()).any(|window| window == name);
        assert!(has(b"libc.so.6\0") && has(b"ld-linux"));
        Ok(())
    }
}
