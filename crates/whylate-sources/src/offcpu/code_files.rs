// SPDX-License-Identifier: MIT OR Apache-2.0
//! Executable files, shared by all processes that map them. No file stays open: what unwinding and symbolization need
//! is cached in memory, within bounds, and read again if it is needed after eviction.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::elf::Elf;
use super::mappings::Mapping;
use super::remote_files::{Identity, RemoteFiles};

/// Maximum bytes cached of all files, and with file names and lines.
const MAX_KEPT: u64 = 22 << 20;
const MAX_KEPT_WITH_LINES: u64 = 512 << 20;
/// Maximum bytes cached while CPU samples of a program are taken: symbols are looked up once for many samples.
const MAX_KEPT_OF_SAMPLES: u64 = 128 << 20;
/// A file used within this time is evicted only for a smaller one: its symbols may not have been looked up yet.
const IN_USE: Duration = Duration::from_secs(3);
/// The data of a file is dropped after this time without use, once its symbols have been looked up.
const UNUSED: Duration = Duration::from_secs(10);
/// Symbols are looked up within this time of a snapshot.
const NAMED_WITHIN: Duration = Duration::from_secs(3);
/// Number of files from which files that no process maps any more are removed.
const MIN_FILES_BEFORE_CLEANUP: usize = 1024;

/// The function at an address, and before it those that the compiler has inlined there, innermost first.
pub(super) type Frames = Vec<String>;

/// An executable file.
#[derive(Default)]
pub(super) struct CodeFile {
    /// Distinguishes it from all files that were read before and after.
    pub(super) id: u64,
    /// `None` after eviction.
    elf: Mutex<Option<Arc<Elf>>>,
    /// Symbols that were looked up, by file offset.
    names: Mutex<HashMap<u64, Frames>>,
    has_failed: AtomicBool,
    /// Time of the last use, in ms since the first file was read.
    used_ms: AtomicU64,
}

impl CodeFile {
    /// Returns the cached data of the file.
    pub(super) fn elf(&self) -> Option<Arc<Elf>> {
        lock(&self.elf).clone()
    }

    /// Locks the symbols by file offset.
    pub(super) fn names(&self) -> MutexGuard<'_, HashMap<u64, Frames>> {
        lock(&self.names)
    }

    /// Records that something could not be read.
    pub(super) fn fail(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Returns whether something could not be read since the last call.
    pub(super) fn take_failure(&self) -> bool {
        self.has_failed.swap(false, Ordering::Relaxed)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All executable files.
pub(super) struct CodeFiles {
    by_identity: HashMap<Identity, Arc<CodeFile>>,
    next_id: u64,
    cleanup_at: usize,
    kept: u64,
    max_kept: u64,
    lines: bool,
    began: Instant,
    dropped_ms: u64,
    /// Time of the snapshot for which symbols may still be looked up, and of the last one for which they have been.
    snapshot_ms: Option<u64>,
    named_ms: u64,
    pub(super) files: RemoteFiles,
}

impl CodeFiles {
    pub(super) fn new(lines: bool) -> Self {
        CodeFiles {
            by_identity: HashMap::new(),
            next_id: 0,
            cleanup_at: MIN_FILES_BEFORE_CLEANUP,
            kept: 0,
            max_kept: if lines { MAX_KEPT_WITH_LINES } else { MAX_KEPT },
            lines,
            began: Instant::now(),
            dropped_ms: 0,
            snapshot_ms: None,
            named_ms: 0,
            files: RemoteFiles::default(),
        }
    }

    /// For CPU samples of one program.
    pub(super) fn of_samples() -> Self {
        CodeFiles { max_kept: MAX_KEPT_OF_SAMPLES, ..CodeFiles::new(false) }
    }

    /// Returns whether files may soon be evicted.
    pub(super) fn is_nearly_full(&self) -> bool {
        self.kept > self.max_kept / 4 * 3
    }

    /// Opens the file of a mapping; `None` if it is not an ELF file.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or the cache has no room for it.
    pub(super) fn open(&mut self, tgid: u32, mapping: &Mapping) -> io::Result<Option<Arc<CodeFile>>> {
        let known = &self.by_identity;
        let is_known = |identity: &Identity| known.get(identity).is_some_and(|file| file.elf().is_some());
        let (identity, file) = self.files.open(tgid, mapping, is_known)?;
        if let Some(file) = file {
            let Some(elf) = Elf::from_file(&file, self.lines)? else { return Ok(None) };
            drop(file);
            self.keep(identity, elf)?;
        }
        let file = self.by_identity.get(&identity).map(Arc::clone);
        file.inspect(|file| self.touch(file)).map(Some).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Records that a file is in use.
    pub(super) fn touch(&self, file: &CodeFile) {
        file.used_ms.store(self.now_ms(), Ordering::Relaxed);
    }

    /// Records that a snapshot is being taken: symbols of all files used so far will be looked up for it.
    pub(super) fn snapshot_taken(&mut self) {
        let now_ms = self.now_ms();
        self.snapshot_ms.get_or_insert(now_ms);
    }

    /// Drops the data of files that have not been used for some time, if their symbols have been looked up.
    pub(super) fn drop_unused(&mut self) {
        let now_ms = self.now_ms();
        if now_ms - self.dropped_ms < 1_000 {
            return;
        }
        self.dropped_ms = now_ms;
        let is_named = |snapshot_ms: &u64| now_ms - snapshot_ms >= NAMED_WITHIN.as_millis() as u64;
        if let Some(snapshot_ms) = self.snapshot_ms.take_if(|snapshot_ms| is_named(snapshot_ms)) {
            self.named_ms = snapshot_ms;
        }
        // Without a snapshot since, symbols may still be needed, however long ago the file was used.
        let used_before = now_ms.saturating_sub(UNUSED.as_millis() as u64).min(self.named_ms);
        for file in self.by_identity.values().filter(|file| file.used_ms.load(Ordering::Relaxed) < used_before) {
            let dropped = lock(&file.elf).take();
            self.kept -= dropped.map_or(0, |elf| elf.bytes());
        }
    }

    fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    fn keep(&mut self, identity: Identity, elf: Elf) -> io::Result<()> {
        if !self.make_room(elf.bytes()) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.kept += elf.bytes();
        self.remove_unmapped();
        let next = &mut self.next_id;
        let file = self.by_identity.entry(identity).or_insert_with(|| {
            *next += 1;
            Arc::new(CodeFile { id: *next, ..CodeFile::default() })
        });
        if !elf.has_all_names() {
            file.fail();
        }
        *lock(&file.elf) = Some(Arc::new(elf));
        Ok(())
    }

    /// Evicts data of other files: first the least recently used of those not in use, then the largest if larger than
    /// the new one. So a user with large files evicts none of the small ones.
    fn make_room(&mut self, bytes: u64) -> bool {
        let in_use_from = self.now_ms().saturating_sub(IN_USE.as_millis() as u64);
        while self.kept + bytes > self.max_kept {
            let read = self.by_identity.values().filter_map(|file| {
                let (used_ms, bytes) = (file.used_ms.load(Ordering::Relaxed), file.elf()?.bytes());
                Some((used_ms, bytes, file))
            });
            let read: Vec<_> = read.collect();
            let unused =
                read.iter().filter(|(used_ms, ..)| *used_ms < in_use_from).min_by_key(|(used_ms, ..)| *used_ms);
            let largest = || read.iter().max_by_key(|(_, bytes, _)| *bytes).filter(|(_, large, _)| *large > bytes);
            let Some((_, dropped, file)) = unused.or_else(largest) else { return false };
            *lock(&file.elf) = None;
            self.kept -= *dropped;
        }
        true
    }

    /// Removes files that no process maps any more, each time that their number has doubled.
    fn remove_unmapped(&mut self) {
        if self.by_identity.len() < self.cleanup_at {
            return;
        }
        let kept = &mut self.kept;
        self.by_identity.retain(|_, file| {
            let is_used = Arc::strong_count(file) > 1;
            if !is_used {
                *kept -= file.elf().map_or(0, |elf| elf.bytes());
            }
            is_used
        });
        self.cleanup_at = (2 * self.by_identity.len()).max(MIN_FILES_BEFORE_CLEANUP);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs::{self, File};
    use std::path::Path;

    use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

    use super::*;
    use crate::offcpu::mappings::tests::{BYTES, Mapped};

    fn program(directory: &Path, name: &str) -> std::path::PathBuf {
        let path = directory.join(name);
        fs::copy("/bin/true", &path).expect("copied");
        path
    }

    /// Puts a mapping on an unknown file system, so that it counts as remote and is copied by another process.
    fn remote(mapping: &Mapping) -> Mapping {
        Mapping { device: (0xfff, 0xfff), ..mapping.clone() }
    }

    fn own_descriptors_below(directory: &Path) -> usize {
        let descriptors = fs::read_dir("/proc/self/fd").expect("/proc is mounted").flatten();
        descriptors.filter(|entry| fs::read_link(entry.path()).is_ok_and(|to| to.starts_with(directory))).count()
    }

    #[test]
    fn reads_each_file_once_and_closes_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut files = CodeFiles::new(false);
        let own = std::process::id();
        let first = Mapped::new(&program(directory.path(), "first"));
        let opened = files.open(own, &first.mapping).expect("it is read").expect("it is an ELF file");
        let elf = opened.elf().expect("it was read");
        let again = files.open(own, &first.mapping).expect("it is known").expect("it is an ELF file");
        assert!(Arc::ptr_eq(&opened, &again) && Arc::ptr_eq(&elf, &again.elf().expect("it was read")));
        let copied = files.open(own, &remote(&first.mapping)).expect("it is copied").expect("it is an ELF file");
        assert!(Arc::ptr_eq(&opened, &copied), "a copy has the identity of the file");
        assert_eq!(own_descriptors_below(directory.path()), 0);
        // A deleted file is still found through its mapping.
        fs::remove_file(directory.path().join("first")).expect("there");
        assert!(files.open(own, &remote(&first.mapping)).is_ok_and(|file| file.is_some()));
    }

    #[test]
    fn distinguishes_files_with_equal_device_and_inode_in_maps() {
        // Two subvolumes of btrfs have the same device and the same inodes there.
        let directory = tempfile::tempdir().expect("a directory");
        let [first, second] = ["first", "second"].map(|name| Mapped::new(&program(directory.path(), name)));
        let (mut files, own) = (CodeFiles::new(false), std::process::id());
        let mut alike = second.mapping.clone();
        alike.inode = first.mapping.inode;
        let [first, alike] = [&first.mapping, &alike].map(|mapping| files.open(own, mapping).expect("it is read"));
        assert!(!Arc::ptr_eq(&first.expect("an ELF file"), &alike.expect("an ELF file")));
    }

    #[test]
    fn distinguishes_files_that_reuse_an_inode() {
        let directory = tempfile::tempdir().expect("a directory");
        let (mut files, own) = (CodeFiles::new(false), std::process::id());
        let path = program(directory.path(), "program");
        let before = Mapped::new(&path);
        let first = files.open(own, &before.mapping).expect("it is read").expect("an ELF file");
        drop(before);
        // The new content has the same inode, length and mtime.
        let about = fs::metadata(&path).expect("there");
        fs::write(&path, fs::read("/bin/true").expect("there")).expect("written");
        let file = File::options().write(true).open(&path).expect("there");
        file.set_modified(about.modified().expect("it has a time")).expect("set");
        let after = Mapped::new(&path);
        let second = files.open(own, &after.mapping).expect("it is read").expect("an ELF file");
        assert!(!Arc::ptr_eq(&first, &second));
    }

    #[test]
    fn notices_remote_file_rewritten_in_place() {
        let directory = tempfile::tempdir().expect("a directory");
        let (mut files, own) = (CodeFiles::new(false), std::process::id());
        let path = program(directory.path(), "program");
        let open = |files: &mut CodeFiles| {
            let mapped = Mapped::new(&path);
            files.open(own, &remote(&mapped.mapping)).expect("it is read").expect("an ELF file")
        };
        let (first, again) = (open(&mut files), open(&mut files));
        assert!(Arc::ptr_eq(&first, &again));
        fs::write(&path, fs::read("/bin/false").expect("there")).expect("written");
        assert!(!Arc::ptr_eq(&first, &open(&mut files)));
    }

    #[test]
    fn does_not_open_file_that_replaced_the_mapped_one() {
        let directory = tempfile::tempdir().expect("a directory");
        let (fifo, other) = (directory.path().join("fifo"), program(directory.path(), "other"));
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("made");
        let notes = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).expect("inotify");
        let (mut files, own) = (CodeFiles::new(false), std::process::id());
        let mut mappings = Vec::new();
        for (number, target) in [&fifo, &other].into_iter().enumerate() {
            let path = program(directory.path(), &number.to_string());
            let mapped = Mapped::new(&path);
            mappings.push(mapped.mapping.clone());
            drop(mapped);
            fs::remove_file(&path).expect("there");
            std::os::unix::fs::symlink(target, &path).expect("linked");
        }
        // Without a symlink: another file was renamed to the path.
        let path = program(directory.path(), "replaced");
        mappings.push(Mapped::new(&path).mapping.clone());
        fs::rename(&other, &path).expect("renamed");
        fs::copy("/bin/true", &other).expect("copied");
        for watched in [&fifo, &other, &path] {
            inotify::add_watch(&notes, watched, WatchFlags::OPEN).expect("watched");
        }
        for mapping in &mappings {
            assert!(files.open(own, mapping).is_err(), "{mapping:?}");
            assert!(files.open(own, &remote(mapping)).is_err(), "{mapping:?}");
        }
        let mut buffer = [std::mem::MaybeUninit::uninit(); 1024];
        assert!(inotify::Reader::new(&notes, &mut buffer).next().is_err(), "something was opened");
    }

    #[test]
    fn does_not_open_device_files() {
        let (mut files, own) = (CodeFiles::new(false), std::process::id());
        let zero = File::open("/dev/zero").expect("there");
        let (code, private) = (ProtFlags::READ, MapFlags::PRIVATE);
        // SAFETY: memory of its own, wherever the kernel has room for it.
        #[allow(unsafe_code)]
        let at = unsafe { mmap(std::ptr::null_mut(), BYTES, code, private, &zero, 0) }.expect("it is mapped");
        let start = at.addr() as u64;
        let mapping =
            Mapping { start, end: start + BYTES as u64, offset: 0, device: (0, 6), inode: 4, path: "/x".into() };
        assert!(files.open(own, &mapping).is_err() && files.open(own, &remote(&mapping)).is_err());
        // SAFETY: nothing refers to it.
        #[allow(unsafe_code)]
        unsafe { munmap(at, BYTES) }.expect("it was mapped");
    }

    #[test]
    fn evicts_large_and_unused_files_first() {
        let directory = tempfile::tempdir().expect("a directory");
        let (mut files, own) = (CodeFiles::new(false), std::process::id());
        let small: Vec<Mapped> =
            (0..4).map(|number| Mapped::new(&program(directory.path(), &number.to_string()))).collect();
        let large = Mapped::new(&std::env::current_exe().expect("there"));
        let opened = |files: &mut CodeFiles, mapped: &Mapped| files.open(own, &mapped.mapping).ok().flatten();
        let (first, big) = (opened(&mut files, &small[0]).expect("read"), opened(&mut files, &large).expect("read"));
        let bytes = |file: &CodeFile| file.elf().map_or(0, |elf| elf.bytes());
        files.max_kept = bytes(&first) + bytes(&big);
        assert_eq!(files.kept, files.max_kept);
        let second = opened(&mut files, &small[1]).expect("read");
        assert!(bytes(&first) > 0 && bytes(&big) == 0 && bytes(&second) > 0);
        files.max_kept = bytes(&first) * 5 / 2;
        assert!(opened(&mut files, &large).is_none() && bytes(&first) > 0, "it would take the room of smaller ones");
        assert!(opened(&mut files, &small[2]).is_none(), "the others are in use");
        first.used_ms.store(0, Ordering::Relaxed);
        files.began -= 2 * IN_USE;
        files.touch(&second);
        let third = opened(&mut files, &small[2]).expect("read");
        assert!(bytes(&first) == 0 && bytes(&second) > 0 && bytes(&third) > 0, "the longest unused one makes room");
        assert_eq!(files.kept, bytes(&second) + bytes(&third));
        files.began -= UNUSED - IN_USE;
        files.touch(&third);
        files.snapshot_taken();
        files.began -= 2 * IN_USE;
        files.drop_unused();
        assert!(bytes(&second) == 0 && bytes(&third) > 0 && files.kept == bytes(&third));
    }

    #[test]
    fn keeps_unused_file_until_symbolized() {
        let directory = tempfile::tempdir().expect("a directory");
        let (mut files, own) = (CodeFiles::new(false), std::process::id());
        let mapped = Mapped::new(&program(directory.path(), "program"));
        let file = files.open(own, &mapped.mapping).expect("it is read").expect("an ELF file");
        // As in a snapshot interval of a minute, at the end of which symbols are looked up.
        files.began -= 6 * UNUSED;
        files.drop_unused();
        assert!(file.elf().is_some());
        files.snapshot_taken();
        files.began -= NAMED_WITHIN / 2;
        files.drop_unused();
        assert!(file.elf().is_some(), "they are being looked up");
        files.began -= NAMED_WITHIN;
        files.drop_unused();
        assert!(file.elf().is_none() && files.kept == 0);
    }

    #[test]
    fn removes_files_of_exited_processes() {
        let directory = tempfile::tempdir().expect("a directory");
        let (mut files, own) = (CodeFiles::new(false), std::process::id());
        files.cleanup_at = 3;
        let mut kept = BTreeSet::new();
        for number in 0..6 {
            let mapped = Mapped::new(&program(directory.path(), &number.to_string()));
            files.open(own, &mapped.mapping).expect("it is read");
            kept.insert(files.by_identity.len());
            files.cleanup_at = files.cleanup_at.min(3);
        }
        assert_eq!(kept, [1, 2, 3].into());
        let bytes: u64 = files.by_identity.values().filter_map(|file| Some(file.elf()?.bytes())).sum();
        assert_eq!(files.kept, bytes);
    }
}
