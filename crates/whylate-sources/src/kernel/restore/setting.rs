// SPDX-License-Identifier: MIT OR Apache-2.0
//! A kernel setting: a file, or one of several words in it.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

/// Maximum length of a setting's file, in bytes.
const MAX_BYTES: usize = 64 << 10;
/// Values of a word.
const ON: &str = "1";
const OFF: &str = "0";

/// Location of a setting.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Setting {
    pub(super) path: PathBuf,
    pub(super) form: Form,
}

/// Format of a setting in its file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Form {
    /// One line, the whole file.
    Line,
    /// A word, prefixed with `NO_` if off, as in osnoise/options.
    Flag(String),
    /// A word, missing if off, and written as `+word` or `-word`: cgroup.subtree_control.
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

    /// Reads the value: for a word, `1` or `0`.
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

/// Returns the value of a word.
pub(super) fn of_word(is_on: bool) -> &'static str {
    if is_on { ON } else { OFF }
}

/// Reads a setting's file, without the trailing newline.
pub(super) fn read(path: &Path) -> anyhow::Result<String> {
    // In one read: some kernel files reject a buffer that may be too short (osnoise_cpus_read()).
    let mut bytes = vec![0; MAX_BYTES];
    let length = File::open(path)
        .and_then(|mut file| file.read(&mut bytes))
        .with_context(|| format!("cannot read {}", path.display()))?;
    Ok(String::from_utf8_lossy(&bytes[..length]).trim_end().to_owned())
}

/// Writes a line: some kernel files append the next write to a text without a newline (osnoise_cpus_write()).
fn write(path: &Path, value: &str) -> io::Result<()> {
    fs::write(path, format!("{value}\n"))
}
