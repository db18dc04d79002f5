// SPDX-License-Identifier: MIT OR Apache-2.0
//! A setting of the kernel: a file, or one of several words in it.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

/// No setting is longer.
const LONGEST: usize = 64 << 10;
/// The values of a word that is on or off.
const ON: &str = "1";
const OFF: &str = "0";

/// Where a setting is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Setting {
    pub(super) path: PathBuf,
    pub(super) form: Form,
}

/// How a setting stands in its file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Form {
    /// One line, all of the file.
    Line,
    /// A word, with `NO_` before it where it is off, as in osnoise/options.
    Flag(String),
    /// A word, missing where it is off, and written as `+word` or `-word`: cgroup.subtree_control.
    Controller(String),
}

impl Setting {
    pub(super) fn line(path: &Path) -> Self {
        Setting { path: path.to_owned(), form: Form::Line }
    }

    pub(super) fn flag(path: &Path, name: &str) -> Self {
        Setting { path: path.to_owned(), form: Form::Flag(name.to_owned()) }
    }

    pub(super) fn controller(path: &Path, name: &str) -> Self {
        Setting { path: path.to_owned(), form: Form::Controller(name.to_owned()) }
    }

    /// The value: of a word, `1` or `0`.
    pub(super) fn read(&self) -> anyhow::Result<String> {
        let text = read(&self.path)?;
        let has = |word: &str| text.split_whitespace().any(|listed| listed == word);
        let is_on = match &self.form {
            Form::Line => return Ok(text),
            Form::Controller(name) => has(name),
            Form::Flag(name) if has(name) => true,
            Form::Flag(name) if has(&format!("NO_{name}")) => false,
            Form::Flag(name) => bail!("{} lists no {name}", self.path.display()),
        };
        Ok(of_word(is_on).to_owned())
    }

    pub(super) fn write(&self, value: &str) -> io::Result<()> {
        let is_on = value == ON;
        match &self.form {
            Form::Line => write(&self.path, value),
            Form::Flag(name) => write(&self.path, &format!("{}{name}", if is_on { "" } else { "NO_" })),
            Form::Controller(name) => write(&self.path, &format!("{}{name}", if is_on { '+' } else { '-' })),
        }
    }
}

/// The value of a word.
pub(super) fn of_word(is_on: bool) -> &'static str {
    if is_on { ON } else { OFF }
}

/// The text of a setting's file, without the end of its line.
pub(super) fn read(path: &Path) -> anyhow::Result<String> {
    // In one piece: some files of the kernel refuse to be read into what may be too short (osnoise_cpus_read()).
    let mut bytes = vec![0; LONGEST];
    let length = File::open(path)
        .and_then(|mut file| file.read(&mut bytes))
        .with_context(|| format!("cannot read {}", path.display()))?;
    Ok(String::from_utf8_lossy(&bytes[..length]).trim_end().to_owned())
}

/// Writes a line: some kernel files take what follows a text without an end for more of it (osnoise_cpus_write()).
fn write(path: &Path, value: &str) -> io::Result<()> {
    fs::write(path, format!("{value}\n"))
}
