// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels that whylate is tested on, and their cache: outside of the work tree, a directory each with `vmlinuz`,
//! `config` and `version`; `modules` if tests load some; and `busybox` if the host's does not run on it.

mod debian;
mod source;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use debian::Debian;

use crate::host;

/// Environment variable for the directory of the kernels, instead of the user's cache.
const CACHE_VARIABLE: &str = "WHYLATE_KERNELS";

/// Prefix of the directories in which kernels are made, before the PID.
const MAKING: &str = ".making-";

/// Files to take from Debian's kernel packages: the image, and the modules that tests load for disks with known times
/// and faults.
const PATTERNS: [&str; 12] = [
    "./boot",
    "*/configfs.ko*",
    "*/null_blk.ko*",
    "*/kernel/block/*.ko*",
    "*/dm-mod.ko*",
    "*/dm-delay.ko*",
    "*/md-mod.ko*",
    "*/raid0.ko*",
    "*/scsi_common.ko*",
    "*/scsi_mod.ko*",
    "*/sd_mod.ko*",
    "*/scsi_debug.ko*",
];

/// A file system that is not built in.
const EXT4: [&str; 5] = ["*/crc16.ko*", "*/crc32c_generic.ko*", "*/mbcache.ko*", "*/jbd2.ko*", "*/ext4.ko*"];

struct Kernel {
    name: &'static str,
    from: From,
}

enum From {
    /// The package that depends on the newest build, and patterns of further modules.
    Package(&'static str, &'static [&'static str]),
    /// Like `Package`, for another architecture, with the package of its busybox.
    Foreign(&'static str, &'static str),
    /// A source package.
    Source(&'static str),
}

static KERNELS: [Kernel; 5] = [
    Kernel { name: "6.1-cloud", from: From::Package("linux-image-cloud-amd64", &[]) },
    Kernel { name: "6.12-cloud", from: From::Package("linux-image-6.12-cloud-amd64", &[]) },
    Kernel { name: "6.12-rt", from: From::Package("linux-image-6.12-rt-amd64", &EXT4) },
    Kernel { name: "6.12-tracers", from: From::Source("linux-source-6.12") },
    Kernel { name: "6.12-arm64", from: From::Foreign("linux-image-6.12-cloud-arm64:arm64", "busybox-static:arm64") },
];

/// Gets the kernels that are not there yet: 6.1-cloud, 6.12-cloud, 6.12-rt and 6.12-arm64 are Debian's; 6.12-tracers is
/// built from Debian's sources, with tracers that those lack, in a quarter of an hour.
///
/// They are kept in $WHYLATE_KERNELS, or in ~/.cache/whylate/kernels. Nothing is installed, and apt's own lists and
/// settings stay as they are.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Only these; all without a name
    names: Vec<String>,
    /// Get them again, in the newest version that Debian has
    #[arg(long)]
    refresh: bool,
    /// Get none, and fail if one is not there
    #[arg(long, conflicts_with = "refresh")]
    cached: bool,
}

/// Prints the path of each kernel.
pub fn run(arguments: &Arguments) -> Result<()> {
    let chosen: Vec<&Kernel> = if arguments.names.is_empty() {
        KERNELS.iter().collect()
    } else {
        arguments.names.iter().map(|name| named(name)).collect::<Result<_>>()?
    };
    let cache = cache()?;
    let mut debian = None;
    for kernel in chosen {
        let directory = cache.join(kernel.name);
        if arguments.cached {
            find(kernel.name)?;
        } else if arguments.refresh || !is_there(kernel, &directory) {
            let debian = match &mut debian {
                Some(debian) => debian,
                none => none.insert(Debian::new(&cache)?),
            };
            get(kernel, debian, &cache)?;
        }
        println!("{}", directory.join("vmlinuz").display());
    }
    Ok(())
}

/// Returns the image of a kernel, by name or path.
pub fn find(kernel: &str) -> Result<PathBuf> {
    if kernel.contains('/') {
        let path = PathBuf::from(kernel);
        return if path.is_file() { Ok(path) } else { Err(anyhow!("there is no kernel {kernel}")) };
    }
    let known = named(kernel)?;
    let directory = cache()?.join(kernel);
    if !is_there(known, &directory) {
        bail!("the kernel {kernel} is not there: `cargo xtask kernels {kernel}` gets it");
    }
    Ok(directory.join("vmlinuz"))
}

fn named(name: &str) -> Result<&'static Kernel> {
    KERNELS.iter().find(|kernel| kernel.name == name).ok_or_else(|| {
        let names: Vec<&str> = KERNELS.iter().map(|kernel| kernel.name).collect();
        anyhow!("no kernel is named {name}: give one of {}, or the path of an image", names.join(", "))
    })
}

fn cache() -> Result<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set(CACHE_VARIABLE)
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("whylate/kernels")))
        .or_else(|| Some(set("HOME")?.join(".cache/whylate/kernels")))
        .map(|directory| std::path::absolute(&directory).unwrap_or(directory))
        .with_context(|| format!("no directory to keep kernels in: set {CACHE_VARIABLE}"))
}

fn is_there(kernel: &Kernel, directory: &Path) -> bool {
    let is_current = match kernel.from {
        From::Package(_, more) => {
            fs::read_to_string(directory.join("patterns")).is_ok_and(|known| known == patterns(more).join(" "))
        }
        From::Foreign(..) => directory.join("busybox").is_file(),
        From::Source(_) => source::is_current(directory),
    };
    is_current && directory.join("vmlinuz").is_file()
}

fn patterns(more: &[&'static str]) -> Vec<&'static str> {
    [&PATTERNS, more].concat()
}

/// Creates the directory of a kernel atomically.
fn get(kernel: &Kernel, debian: &Debian, cache: &Path) -> Result<()> {
    fs::create_dir_all(cache).with_context(|| format!("cannot create {}: set {CACHE_VARIABLE}", cache.display()))?;
    remove_leftovers(cache);
    // In the cache, as a kernel's objects are too large for some machines' /tmp.
    let prefix = format!("{MAKING}{}-", std::process::id());
    let work = tempfile::Builder::new().prefix(&prefix).tempdir_in(cache)?;
    let made = work.path().join("made");
    fs::create_dir(&made)?;
    let version = match kernel.from {
        From::Package(depends, _) | From::Foreign(depends, _) => {
            let package = debian.dependency(depends, "linux-image-")?;
            let version = debian.version_of(&package)?;
            eprintln!("{}: getting {package} {version}", kernel.name);
            let patterns = match kernel.from {
                From::Package(_, more) => patterns(more),
                _ => PATTERNS[..1].into(),
            };
            let unpacked = debian.unpack(&package, &patterns, work.path())?;
            take_image(&unpacked.join("boot"), &made)?;
            if patterns.len() > 1 {
                take_modules(&unpacked, &made.join("modules"))?;
                fs::write(made.join("patterns"), patterns.join(" "))?;
            }
            if let From::Foreign(_, busybox) = kernel.from {
                let unpacked = debian.unpack(busybox, &["./bin"], work.path())?;
                fs::rename(unpacked.join("bin/busybox"), made.join("busybox"))?;
            }
            format!("{package} {version}")
        }
        From::Source(package) => {
            let version = debian.version_of(package)?;
            eprintln!("{}: getting {package} {version}", kernel.name);
            let unpacked = debian.unpack(package, &["./usr/src"], work.path())?;
            source::build(
                kernel.name,
                &unpacked.join("usr/src").join(format!("{package}.tar.xz")),
                work.path(),
                &made,
            )?;
            format!("{package} {version}")
        }
    };
    fs::write(made.join("version"), version + "\n")?;
    let directory = cache.join(kernel.name);
    if directory.exists() {
        fs::rename(&directory, work.path().join("old"))?;
    }
    fs::rename(&made, &directory).with_context(|| format!("cannot put the kernel in {}", directory.display()))
}

/// Removes the directories of killed builds: a kernel's objects take gigabytes.
fn remove_leftovers(cache: &Path) {
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let maker = name.to_str().and_then(|name| name.strip_prefix(MAKING)?.split('-').next()?.parse::<u32>().ok());
        if maker.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Moves the package's modules to `to`, decompressed.
fn take_modules(unpacked: &Path, to: &Path) -> Result<()> {
    fs::create_dir(to)?;
    let mut directories = vec![unpacked.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() && !path.is_symlink() {
                directories.push(path);
            } else if name.ends_with(".ko.xz") {
                host::run(Command::new("xz").arg("--decompress").arg(&path))?;
                fs::rename(path.with_extension(""), to.join(name.trim_end_matches(".xz")))?;
            } else if name.ends_with(".ko") {
                fs::rename(&path, to.join(name))?;
            }
        }
    }
    Ok(())
}

/// Moves the image and its configuration from a package's /boot.
fn take_image(boot: &Path, to: &Path) -> Result<()> {
    for (prefix, name) in [("vmlinuz-", "vmlinuz"), ("config-", "config")] {
        let mut found = fs::read_dir(boot)?.filter_map(Result::ok).map(|entry| entry.path());
        let found = found.find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)));
        fs::rename(found.with_context(|| format!("the package has no {name}"))?, to.join(name))?;
    }
    Ok(())
}
