// SPDX-License-Identifier: MIT OR Apache-2.0
//! Golden files, and the recordings that they are about.
#![allow(dead_code)]

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

pub const RECORDINGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recordings");
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");

/// The names of all recordings, without their extension.
pub fn recordings() -> Result<Vec<String>> {
    let names = fs::read_dir(RECORDINGS)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let names = names.collect::<Result<Vec<String>>>()?;
    let mut names: Vec<String> =
        names.iter().filter_map(|name| Some(name.strip_suffix(".whylate")?.to_owned())).collect();
    names.sort_unstable();
    ensure!(names.len() > 10, "{RECORDINGS} has {} only", names.len());
    Ok(names)
}

/// Compares a text with its golden file, or writes it there.
pub fn check(recording: &str, name: &str, text: &str) -> Result<()> {
    let path = Path::new(GOLDEN).join(recording).join(format!("{name}.txt"));
    if std::env::var_os("WHYLATE_BLESS").is_some() {
        fs::create_dir_all(path.parent().context("a directory")?)?;
        return Ok(fs::write(path, text)?);
    }
    let golden = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    if golden != text {
        let mut lines = golden.lines().zip(text.lines()).enumerate();
        let (line, (was, is)) = lines.find(|(_, (was, is))| was != is).unwrap_or((0, ("", "")));
        anyhow::bail!("line {}, or the end\n  - {was}\n  + {is}", line + 1);
    }
    Ok(())
}
