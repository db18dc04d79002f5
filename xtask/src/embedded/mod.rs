// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lists all that is linked into the static program, as a copyright file and as a bill of materials.

mod bill;
mod c_libraries;
mod copyright;
mod crates;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::Args;

/// Write the copyright file, the license texts and the bill of materials of the static program
#[derive(Debug, Args)]
pub struct Arguments {
    /// Target of the program, such as x86_64-unknown-linux-gnu
    #[arg(long, value_name = "TRIPLE")]
    target: String,
    /// C compiler whose libraries are linked
    #[arg(long, value_name = "COMMAND", default_value = "cc")]
    cc: String,
    /// Time of the release, as in RFC 3339
    #[arg(long, value_name = "TIME")]
    time: String,
    /// Directory to write to: copyright, whylate.cdx.json and licenses/
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
}

/// A library, runtime or script in the program.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Component {
    name: String,
    version: String,
    /// Package URL (<https://github.com/package-url/purl-spec>).
    url: String,
    /// SPDX expression of the licenses that its authors offer.
    offered: String,
    /// SPDX expression of the licenses under which it is in the program.
    license: String,
    /// Copyright notices, each a line.
    notices: Vec<String>,
    /// SHA-256 of its source archive, if Cargo.lock has it.
    sha256: Option<String>,
    /// Remark for the copyright file.
    remark: Option<String>,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let metadata = crates::metadata(&arguments.target)?;
    let mut components = crates::linked(&arguments.target, &metadata)?;
    components.extend(c_libraries::linked(&arguments.cc, &metadata)?);
    components.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
    fs::create_dir_all(arguments.to.join("licenses"))?;
    let texts = copyright::texts(&components, &metadata)?;
    for (name, text) in &texts {
        write(&arguments.to.join("licenses").join(format!("{name}.txt")), text)?;
    }
    write(&arguments.to.join("copyright"), &copyright::file(&components, &texts)?)?;
    let bill = bill::of(&components, &arguments.time)?;
    write(&arguments.to.join("whylate.cdx.json"), &bill)
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
