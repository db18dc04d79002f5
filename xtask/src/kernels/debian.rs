// SPDX-License-Identifier: MIT OR Apache-2.0
//! Packages of Debian 12, on any system with apt: with lists and settings of its own, so that the system's stay
//! unchanged.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::host::{cannot_run, output_of, run};

/// bookworm has 6.1; its security archive also has a 6.12 built for it.
const SOURCES: &str = "\
Types: deb
URIs: http://deb.debian.org/debian
Suites: bookworm
Components: main
Architectures: amd64 arm64
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://deb.debian.org/debian-security
Suites: bookworm-security
Components: main
Architectures: amd64 arm64
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
";

/// apt with its own state.
pub struct Debian {
    options: Vec<String>,
}

impl Debian {
    /// Downloads the package lists.
    pub fn new(cache: &Path) -> Result<Self> {
        let directory = cache.join("apt");
        for sub in ["lists/partial", "cache/archives/partial", "sources", "preferences"] {
            fs::create_dir_all(directory.join(sub))
                .with_context(|| format!("cannot create {}", directory.display()))?;
        }
        fs::write(directory.join("sources/debian.sources"), SOURCES)?;
        // Ignores what the system has installed.
        fs::write(directory.join("status"), "")?;
        let at = |sub: &str| directory.join(sub).display().to_string();
        let options = [
            format!("Dir::State={}", at("")),
            format!("Dir::State::lists={}", at("lists")),
            format!("Dir::State::status={}", at("status")),
            format!("Dir::Cache={}", at("cache")),
            "Dir::Etc::sourcelist=/dev/null".to_owned(),
            format!("Dir::Etc::sourceparts={}", at("sources")),
            "Dir::Etc::preferences=/dev/null".to_owned(),
            format!("Dir::Etc::preferencesparts={}", at("preferences")),
            "APT::Architecture=amd64".to_owned(),
            "APT::Architectures::=amd64".to_owned(),
            "APT::Architectures::=arm64".to_owned(),
            // The system's hooks, which clean its own caches.
            "APT::Update::Post-Invoke=".to_owned(),
            "APT::Update::Post-Invoke-Success=".to_owned(),
            // apt's sandbox user cannot write here.
            "APT::Sandbox::User=".to_owned(),
            "Acquire::Languages=none".to_owned(),
            "Acquire::Retries=3".to_owned(),
        ];
        let options = options.into_iter().flat_map(|option| ["-o".to_owned(), option]).collect();
        let debian = Self { options };
        // Without this option apt succeeds even if it could read no list.
        run(debian.apt("apt-get").args(["-qq", "--error-on=any", "update"])).context("cannot read Debian's lists")?;
        Ok(debian)
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.args(&self.options).env("LC_ALL", "C");
        command
    }

    /// Returns the dependency of this package with a name that starts with `prefix`.
    pub fn dependency(&self, package: &str, prefix: &str) -> Result<String> {
        let depends = output_of(self.apt("apt-cache").args(["depends", "--important", package]))?;
        let mut packages = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        let found = packages.find(|package| package.starts_with(prefix));
        Ok(found.with_context(|| format!("Debian's {package} depends on no {prefix}*"))?.to_owned())
    }

    /// Returns the newest version.
    pub fn version_of(&self, package: &str) -> Result<String> {
        let policy = output_of(self.apt("apt-cache").args(["policy", package]))?;
        let version = policy.lines().find_map(|line| line.trim().strip_prefix("Candidate: "));
        Ok(version
            .filter(|&version| version != "(none)")
            .with_context(|| format!("Debian has no {package}"))?
            .to_owned())
    }

    /// Downloads a package and unpacks the files and directories that match the patterns; returns where.
    pub fn unpack(&self, package: &str, patterns: &[&str], work: &Path) -> Result<PathBuf> {
        let download = work.join("download");
        fs::create_dir_all(&download)?;
        run(self.apt("apt-get").args(["-qq", "download", package]).current_dir(&download))?;
        let mut files = fs::read_dir(&download)?.filter_map(Result::ok).map(|entry| entry.path());
        let file = files.find(|path| path.extension().is_some_and(|extension| extension == "deb"));
        let file = file.with_context(|| format!("apt-get downloaded no {package}"))?;
        let to = work.join("package");
        fs::create_dir_all(&to)?;
        let mut archive = Command::new("dpkg-deb");
        archive.arg("--fsys-tarfile").arg(&file).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut archive = archive.spawn().map_err(|error| cannot_run("dpkg-deb", error))?;
        let content = archive.stdout.take().context("dpkg-deb has no output")?;
        let mut unpack = Command::new("tar");
        unpack.arg("-x").arg("-C").arg(&to).arg("--wildcards").args(patterns).stdin(content);
        let unpacked = unpack.status().map_err(|error| cannot_run("tar", error));
        let archived = archive.wait()?;
        if !unpacked?.success() || !archived.success() {
            bail!("cannot unpack {}: see the message above", file.display());
        }
        fs::remove_dir_all(&download)?;
        Ok(to)
    }
}
