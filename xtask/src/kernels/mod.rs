// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels that whylate is tested on, and where they are kept: outside of the work tree, a folder each with
//! `vmlinuz`, `config`, `version` and, where it has any that tests load, `modules`; `busybox` where this machine's own
//! does not run on it.

mod debian;
mod source;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use debian::Debian;

use crate::host;

/// Where the kernels are, instead of in the user's cache.
const FOLDER: &str = "WHYLATE_KERNELS";

/// How the folders begin in which kernels are made; then comes the number of the process.
const MAKING: &str = ".making-";

/// What is taken of Debian's kernels: the image, and modules that tests load, for disks whose times and faults are known.
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

/// A file system, where it is not built in.
const EXT4: [&str; 5] = ["*/crc16.ko*", "*/crc32c_generic.ko*", "*/mbcache.ko*", "*/jbd2.ko*", "*/ext4.ko*"];

struct Kernel {
    name: &'static str,
    from: From,
}

enum From {
    /// The package on which this one depends: it names the newest build. With the modules that tests load, and these.
    Package(&'static str, &'static [&'static str]),
    /// The same of another processor, with the package of its busybox.
    Foreign(&'static str, &'static str),
    /// This package of sources.
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

/// Prints the path of each.
pub fn run(arguments: &Arguments) -> Result<()> {
    let chosen: Vec<&Kernel> = if arguments.names.is_empty() {
        KERNELS.iter().collect()
    } else {
        arguments.names.iter().map(|name| named(name)).collect::<Result<_>>()?
    };
    let cache = cache()?;
    let mut debian = None;
    for kernel in chosen {
        let folder = cache.join(kernel.name);
        if arguments.cached {
            find(kernel.name)?;
        } else if arguments.refresh || !is_there(kernel, &folder) {
            let debian = match &mut debian {
                Some(debian) => debian,
                none => none.insert(Debian::new(&cache)?),
            };
            get(kernel, debian, &cache)?;
        }
        println!("{}", folder.join("vmlinuz").display());
    }
    Ok(())
}

/// The image of a kernel that has a name here, or a path.
pub fn find(kernel: &str) -> Result<PathBuf> {
    if kernel.contains('/') {
        let path = PathBuf::from(kernel);
        return if path.is_file() { Ok(path) } else { Err(anyhow!("there is no kernel {kernel}")) };
    }
    let known = named(kernel)?;
    let folder = cache()?.join(kernel);
    if !is_there(known, &folder) {
        bail!("the kernel {kernel} is not there: `cargo xtask kernels {kernel}` gets it");
    }
    Ok(folder.join("vmlinuz"))
}

fn named(name: &str) -> Result<&'static Kernel> {
    KERNELS.iter().find(|kernel| kernel.name == name).ok_or_else(|| {
        let names: Vec<&str> = KERNELS.iter().map(|kernel| kernel.name).collect();
        anyhow!("no kernel is named {name}: give one of {}, or the path of an image", names.join(", "))
    })
}

fn cache() -> Result<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set(FOLDER)
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("whylate/kernels")))
        .or_else(|| Some(set("HOME")?.join(".cache/whylate/kernels")))
        .map(|folder| std::path::absolute(&folder).unwrap_or(folder))
        .with_context(|| format!("nobody says where to keep kernels: set {FOLDER}"))
}

fn is_there(kernel: &Kernel, folder: &Path) -> bool {
    let is_current = match kernel.from {
        From::Package(_, more) => {
            fs::read_to_string(folder.join("patterns")).is_ok_and(|known| known == patterns(more).join(" "))
        }
        From::Foreign(..) => folder.join("busybox").is_file(),
        From::Source(_) => source::is_current(folder),
    };
    is_current && folder.join("vmlinuz").is_file()
}

fn patterns(more: &[&'static str]) -> Vec<&'static str> {
    [&PATTERNS, more].concat()
}

/// Makes the folder of a kernel, all at once.
fn get(kernel: &Kernel, debian: &Debian, cache: &Path) -> Result<()> {
    fs::create_dir_all(cache).with_context(|| format!("cannot create {}: set {FOLDER}", cache.display()))?;
    remove_leftovers(cache);
    // In the cache, because a kernel's objects are too large for some machines' /tmp.
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
    let folder = cache.join(kernel.name);
    if folder.exists() {
        fs::rename(&folder, work.path().join("old"))?;
    }
    fs::rename(&made, &folder).with_context(|| format!("cannot put the kernel in {}", folder.display()))
}

/// Removes what was being made by processes that were killed: a kernel's objects take gigabytes.
fn remove_leftovers(cache: &Path) {
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let maker = name.to_str().and_then(|name| name.strip_prefix(MAKING)?.split('-').next()?.parse::<u32>().ok());
        if maker.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Takes the modules from wherever a package has them, as the kernel loads them.
fn take_modules(unpacked: &Path, to: &Path) -> Result<()> {
    fs::create_dir(to)?;
    let mut folders = vec![unpacked.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() && !path.is_symlink() {
                folders.push(path);
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

/// Takes the one image and its configuration from a package's /boot.
fn take_image(boot: &Path, to: &Path) -> Result<()> {
    for (prefix, name) in [("vmlinuz-", "vmlinuz"), ("config-", "config")] {
        let mut found = fs::read_dir(boot)?.filter_map(Result::ok).map(|entry| entry.path());
        let found = found.find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)));
        fs::rename(found.with_context(|| format!("the package has no {name}"))?, to.join(name))?;
    }
    Ok(())
}
