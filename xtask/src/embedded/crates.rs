// SPDX-License-Identifier: MIT OR Apache-2.0
//! Crates in the static program, with their licenses and copyright notices.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use super::Component;

/// Licenses that are chosen where a crate offers several, the preferred one first.
const PREFERRED: [&str; 8] =
    ["MIT", "BSD-2-Clause", "BSD-3-Clause", "Zlib", "0BSD", "Apache-2.0", "CDDL-1.0", "Unicode-3.0"];

/// What `cargo metadata` reports.
pub struct Metadata {
    packages: Vec<Value>,
    checksums: BTreeMap<(String, String), String>,
}

impl Metadata {
    /// Returns the package of that name and, if given, version.
    fn package(&self, name: &str, version: Option<&str>) -> Result<&Value> {
        let is =
            |package: &&Value| package["name"] == name && version.is_none_or(|version| package["version"] == version);
        self.packages.iter().find(is).with_context(|| format!("cargo metadata has no {name}"))
    }

    /// Returns the version of a crate, and the directory with its sources.
    pub fn source(&self, name: &str) -> Result<(&str, PathBuf)> {
        let package = self.package(name, None)?;
        Ok((text(package, "version")?, directory(package)?))
    }
}

/// Runs `cargo metadata` for a target.
pub fn metadata(target: &str) -> Result<Metadata> {
    let arguments = ["metadata", "--format-version=1", "--features=whylate/static", "--filter-platform", target];
    let mut metadata: Value = serde_json::from_str(&output_of(cargo().args(arguments))?)?;
    let Value::Array(packages) = metadata["packages"].take() else { bail!("cargo metadata lists no packages") };
    let lock = fs::read_to_string("Cargo.lock").context("cannot read Cargo.lock")?;
    Ok(Metadata { packages, checksums: checksums(&lock) })
}

/// Returns the crates whose code is in the program; build scripts and procedural macros are not.
pub fn linked(target: &str, metadata: &Metadata) -> Result<Vec<Component>> {
    let arguments = ["tree", "--package=whylate", "--features=static", "--target", target, "--prefix=none"];
    let tree = output_of(cargo().args(arguments).args(["--edges=normal,no-proc-macro", "--format={p}"]))?;
    let names: BTreeSet<(&str, &str)> = tree.lines().filter_map(name_and_version).collect();
    ensure!(names.iter().any(|(name, _)| *name == "libbpf-sys"), "cargo tree does not list libbpf-sys");
    let is_foreign = |(name, _): &&(&str, &str)| !name.starts_with("whylate");
    names.iter().filter(is_foreign).map(|&(name, version)| component(name, version, metadata)).collect()
}

fn component(name: &str, version: &str, metadata: &Metadata) -> Result<Component> {
    let package = metadata.package(name, Some(version))?;
    let offered = text(package, "license").with_context(|| format!("{name} states no license"))?;
    let offered = offered.replace(" / ", " OR ").replace('/', " OR ");
    let notices = notices(&directory(package)?)?;
    let authors = package["authors"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let authors: Vec<String> = authors.map(str::to_owned).collect();
    let notices = match (notices.is_empty(), authors.is_empty()) {
        (false, _) => notices,
        (true, false) => authors,
        (true, true) => vec![format!("the authors of {name}")],
    };
    Ok(Component {
        name: name.to_owned(),
        version: version.to_owned(),
        url: format!("pkg:cargo/{name}@{}", version.replace('+', "%2B")),
        license: chosen(&offered).with_context(|| format!("{name} has an unexpected license: {offered}"))?,
        offered,
        notices,
        sha256: metadata.checksums.get(&(name.to_owned(), version.to_owned())).cloned(),
        remark: None,
    })
}

/// Returns the licenses to use of an expression without nested parentheses: one of each alternative.
fn chosen(offered: &str) -> Option<String> {
    let one_of = |alternatives: &str| {
        let alternatives: Vec<&str> =
            alternatives.trim_matches(['(', ')']).split(" OR ").map(|one| one.trim_matches(['(', ')'])).collect();
        PREFERRED.into_iter().find(|license| alternatives.contains(license))
    };
    let all: Option<Vec<&str>> = offered.split(" AND ").map(one_of).collect();
    all.map(|all| all.join(" AND "))
}

/// Returns the copyright notices in the license files of a crate.
fn notices(directory: &Path) -> Result<Vec<String>> {
    let mut files: Vec<PathBuf> = fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.sort();
    let mut found = Vec::new();
    for file in files.into_iter().filter(|file| file.is_file()) {
        let name = file.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        if ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"].iter().any(|start| name.starts_with(start)) {
            for notice in notices_in(&String::from_utf8_lossy(&fs::read(&file)?)) {
                if !found.contains(&notice) {
                    found.push(notice);
                }
            }
        }
    }
    Ok(found)
}

/// Returns the lines that state a copyright, without those of templates and of the license's text.
fn notices_in(text: &str) -> Vec<String> {
    let lines = text.lines().map(|line| line.trim().trim_start_matches(['/', '*', '#', ' ']).trim_end());
    let states = lines.filter(|line| {
        let lower = line.to_lowercase();
        let has_digit = lower.chars().any(|one| one.is_ascii_digit());
        let is_statement = match lower.strip_prefix("copyright ") {
            Some(rest) => has_digit || ["(c)", "©", "the "].iter().any(|start| rest.starts_with(start)),
            // Clauses are numbered like this, too.
            None => has_digit && ["(c) ", "©"].iter().any(|start| lower.starts_with(start)),
        };
        const TEMPLATES: [&str; 5] = ["yyyy", "{year}", "<year>", "[year]", "free software foundation"];
        is_statement && !TEMPLATES.iter().any(|template| lower.contains(template))
    });
    states.map(str::to_owned).collect()
}

/// Parses a line of `cargo tree`: `name v1.2.3 (more)`.
fn name_and_version(line: &str) -> Option<(&str, &str)> {
    let mut words = line.split_whitespace();
    Some((words.next()?, words.next()?.strip_prefix('v')?))
}

/// Returns the checksums in Cargo.lock, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let value = |package: &str, key: &str| {
        let start = format!("{key} = \"");
        package.lines().find_map(|line| Some(line.strip_prefix(&start)?.strip_suffix('"')?.to_owned()))
    };
    let of_package =
        |package: &str| Some(((value(package, "name")?, value(package, "version")?), value(package, "checksum")?));
    lock.split("[[package]]").filter_map(of_package).collect()
}

fn directory(package: &Value) -> Result<PathBuf> {
    let manifest = PathBuf::from(text(package, "manifest_path")?);
    Ok(manifest.parent().context("a manifest is in no directory")?.to_owned())
}

fn text<'a>(package: &'a Value, key: &str) -> Result<&'a str> {
    package[key].as_str().with_context(|| format!("a package has no {key}"))
}

fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Returns what a command prints.
pub fn output_of(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chooses_one_license_of_each_alternative() {
        let of = |offered| chosen(offered).unwrap_or_default();
        assert_eq!(of("Apache-2.0 OR MIT"), "MIT");
        assert_eq!(of("Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT"), "MIT");
        assert_eq!(of("LGPL-2.1-only OR BSD-2-Clause"), "BSD-2-Clause");
        assert_eq!(of("BSD-3-Clause AND BSD-2-Clause"), "BSD-3-Clause AND BSD-2-Clause");
        assert_eq!(of("(MIT OR Apache-2.0) AND Unicode-3.0"), "MIT AND Unicode-3.0");
        assert_eq!(chosen("GPL-3.0-only"), None);
    }

    #[test]
    fn finds_notices_but_no_templates() {
        let text = "MIT\n\nCopyright (c) 2019 The authors\n  (C) 1995-2022 Gailly\n// Copyright 2016 Google\n\
                    (c) You must retain all notices\nCopyright [yyyy] [name of copyright owner]\ncopyright notice and this list of conditions\n\
                    Copyright (C) 1991 Free Software Foundation, Inc.";
        assert_eq!(
            notices_in(text),
            ["Copyright (c) 2019 The authors", "(C) 1995-2022 Gailly", "Copyright 2016 Google"]
        );
    }

    #[test]
    fn reads_trees_and_lock_files() {
        assert_eq!(name_and_version("whylate v0.1.0 (/a/b)"), Some(("whylate", "0.1.0")));
        assert_eq!(name_and_version(""), None);
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.0.0\"\nchecksum = \"00ff\"\n\n[[package]]\nname = \"own\"\n\
                    version = \"0.1.0\"\n";
        let checksums = checksums(lock);
        assert_eq!(checksums.len(), 1);
        assert_eq!(checksums[&("a".to_owned(), "1.0.0".to_owned())], "00ff");
    }
}
