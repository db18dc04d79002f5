// SPDX-License-Identifier: MIT OR Apache-2.0
//! A disk with known service times and faults: the kernel's null_blk, where a timer completes requests.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use whylate_sources::block::{BlockOptions, By};

const CONFIG: &str = "/sys/kernel/config";
pub const BLOCK: usize = 4096;
pub const SIZE_MIB: u64 = 64;

/// A buffer that is aligned for direct I/O.
#[repr(align(4096))]
pub struct Buffer(pub [u8; BLOCK]);

/// Loads those modules, with parameters, that exist and are not loaded.
pub fn load_modules(modules: &[(&str, &str)]) {
    for (module, parameters) in modules {
        let file = format!("/lib/modules/{module}.ko");
        if Path::new(&file).is_file() && !Path::new("/sys/module").join(module.replace('-', "_")).exists() {
            // insmod fails for a built-in module.
            let _ = Command::new("insmod").arg(file).args(parameters.split_whitespace()).status();
        }
    }
}

pub struct Null {
    pub name: String,
    pub directory: PathBuf,
}

impl Null {
    /// Creates a device that takes `took` for each request and accepts `depth` at once. Returns `None`, and prints why,
    /// if the kernel has no null_blk.
    pub fn make(took: Duration, depth: u32) -> Result<Option<Null>> {
        Null::with(took, depth, &[])
    }

    /// Like [`Null::make`], with more settings.
    pub fn with(took: Duration, depth: u32, more: &[(&str, &str)]) -> Result<Option<Null>> {
        load_modules(&[("configfs", ""), ("null_blk", "nr_devices=0"), ("mq-deadline", "")]);
        if !Path::new("/sys/module/null_blk").exists() {
            println!("skipped: this kernel has no null_blk");
            return Ok(None);
        }
        if !Path::new(CONFIG).join("nullb").exists() {
            let mounted = Command::new("mount").args(["-t", "configfs", "configfs", CONFIG]).status()?;
            ensure!(mounted.success(), "configfs cannot be mounted");
        }
        let directory = Path::new(CONFIG).join("nullb/nullb7");
        // A killed run may have left one.
        let _ = fs::remove_dir(&directory);
        fs::create_dir(&directory).context("cannot make a null device")?;
        let mut null = Null { name: "nullb7".to_owned(), directory };
        // 2: a timer completes requests.
        null.set("irqmode", "2")?;
        null.set("completion_nsec", &took.as_nanos().to_string())?;
        null.set("hw_queue_depth", &depth.to_string())?;
        null.set("submit_queues", "1")?;
        null.set("blocksize", &BLOCK.to_string())?;
        null.set("size", &SIZE_MIB.to_string())?;
        more.iter().try_for_each(|(name, value)| null.set(name, value))?;
        null.set("power", "1")?;
        // Before 6.3 the device is named by its index.
        let number = fs::read_to_string(null.directory.join("index"))?;
        let by_number = format!("nullb{}", number.trim());
        if !Path::new("/dev/nullb7").exists() {
            null.name = by_number;
        }
        Ok(Some(null))
    }

    /// Returns whether this kernel's null_blk has the setting, by the module's list of features.
    pub fn can(setting: &str) -> bool {
        fs::read_to_string(Path::new(CONFIG).join("nullb/features"))
            .is_ok_and(|known| known.trim().split(',').any(|known| known == setting))
    }

    pub fn set(&self, name: &str, value: &str) -> Result<()> {
        fs::write(self.directory.join(name), value).with_context(|| format!("cannot set {name}"))
    }

    pub fn schedule_by(&self, scheduler: &str) -> Result<()> {
        Ok(fs::write(format!("/sys/block/{}/queue/scheduler", self.name), scheduler)?)
    }

    pub fn path(&self) -> PathBuf {
        Path::new("/dev").join(&self.name)
    }

    pub fn open(&self) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(self.path())
    }

    pub fn options(&self) -> BlockOptions {
        BlockOptions { device: Some(self.name.clone()), by: By::Thread, phases: true, ..BlockOptions::default() }
    }
}

impl Drop for Null {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.directory);
    }
}

/// A journaling file system on a null device, unmounted on drop.
pub struct Mounted {
    pub null: Null,
    pub directory: tempfile::TempDir,
}

impl Mounted {
    /// The disk takes one request at a time, so that kworkers issue most of them.
    pub fn make(size_mib: u64) -> Result<Option<Mounted>> {
        let more = [("memory_backed", "1"), ("cache_size", "0"), ("size", &*size_mib.to_string())];
        let Some(null) = Null::with(Duration::from_millis(1), 1, &more)? else { return Ok(None) };
        load_modules(&[("crc32c_generic", ""), ("crc16", ""), ("mbcache", ""), ("jbd2", ""), ("ext4", "")]);
        let mut mkfs = Command::new("mkfs.ext4");
        mkfs.args(["-q", "-F", "-b", "4096", "-J", "size=4", "-E", "lazy_itable_init=0,lazy_journal_init=0"]);
        let Ok(made) = mkfs.arg(null.path()).stdout(Stdio::null()).status() else {
            println!("skipped: there is no mkfs.ext4");
            return Ok(None);
        };
        ensure!(made.success(), "no file system can be made");
        let mounted = Mounted { null, directory: tempfile::tempdir()? };
        let mut mount = Command::new("mount");
        // Without the file system's own threads, which would read and write at any time.
        mount
            .args(["-t", "ext4", "-o", "noinit_itable,no_prefetch_block_bitmaps"])
            .arg(mounted.null.path())
            .arg(mounted.directory.path());
        ensure!(mount.status()?.success(), "it cannot be mounted");
        File::open(mounted.directory.path())?.sync_all()?;
        Ok(Some(mounted))
    }

    pub fn sync(&self) -> Result<()> {
        Ok(rustix::fs::syncfs(File::open(self.directory.path())?)?)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.directory.path()).status();
    }
}
