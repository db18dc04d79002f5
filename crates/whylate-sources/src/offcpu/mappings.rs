// SPDX-License-Identifier: MIT OR Apache-2.0
//! The executable mappings of a process, read from /proc/PID/maps within bounds.

use std::io::{self, BufRead, Read as _};
use std::sync::Arc;

use crate::kernel::mounts::Device;

/// Maximum bytes read of one process's maps: 200,000 lines of 300 bytes.
const MAX_TEXT: u64 = 64 << 20;
/// Maximum bytes kept of one process's mappings: 40,000 mappings of different files.
const MAX_KEPT: usize = 4 << 20;
/// Length of the longest line: a path of 4,096 bytes, each of which may be escaped in four.
const MAX_LINE: u64 = 20_000;

/// An executable mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) offset: u64,
    pub(super) device: Device,
    /// 0 for anonymous memory, such as that of a just-in-time compiler.
    pub(super) inode: u64,
    /// Path of the file in the mount namespace of the process.
    pub(super) path: Arc<str>,
}

impl Mapping {
    pub(super) fn offset_of(&self, address: u64) -> u64 {
        address - self.start + self.offset
    }

    pub(super) fn holds(&self, address: u64) -> bool {
        (self.start..self.end).contains(&address)
    }
}

/// The mappings of a process.
#[derive(Debug, Default)]
pub(super) struct Mappings {
    /// Mappings by address.
    pub(super) list: Vec<Mapping>,
    /// Memory of the list, in bytes.
    pub(super) bytes: usize,
    /// Whether mappings were dropped: the list was longer than is read, or kept.
    pub(super) is_cut: bool,
}

impl Mappings {
    /// Reads /proc/PID/maps. Of a list that is too long, mappings with one of the `wanted` addresses, which are sorted,
    /// are always kept.
    ///
    /// # Errors
    /// Fails if the kernel does not let the file be read.
    pub(super) fn read(maps: impl BufRead, wanted: &[u64]) -> io::Result<Self> {
        let mut mappings = Mappings::default();
        let (mut maps, mut line) = (maps.take(MAX_TEXT), Vec::new());
        loop {
            line.clear();
            if (&mut maps).take(MAX_LINE).read_until(b'\n', &mut line)? == 0 {
                break;
            }
            if line.last() == Some(&b'\n') {
                line.pop();
            } else if line.len() as u64 >= MAX_LINE || maps.limit() == 0 {
                mappings.is_cut = true;
                break;
            }
            if let Some(code) = MapsLine::parse(&String::from_utf8_lossy(&line)) {
                mappings.add(&code, wanted);
            }
        }
        mappings.is_cut |= maps.limit() == 0;
        mappings.list.shrink_to_fit();
        Ok(mappings)
    }

    fn add(&mut self, code: &MapsLine<'_>, wanted: &[u64]) {
        let last = self.list.last_mut();
        let is_next_to = |last: &&mut Mapping| last.end == code.start && last.path.is_empty() && last.inode == 0;
        // A just-in-time compiler makes pages executable one by one.
        if code.inode == 0
            && code.path.is_empty()
            && let Some(last) = last.filter(is_next_to)
        {
            last.end = code.end;
            return;
        }
        let path = self.list.last().filter(|last| *last.path == *code.path).map(|last| Arc::clone(&last.path));
        let bytes = size_of::<Mapping>() + if path.is_some() { 0 } else { size_of::<[usize; 2]>() + code.path.len() };
        if self.bytes + bytes > MAX_KEPT {
            self.is_cut = true;
            let after = wanted.partition_point(|address| *address < code.start);
            if wanted.get(after).is_none_or(|address| *address >= code.end) {
                return;
            }
        }
        self.bytes += bytes;
        self.list.push(Mapping {
            start: code.start,
            end: code.end,
            offset: code.offset,
            device: code.device,
            inode: code.inode,
            path: path.unwrap_or_else(|| code.path.into()),
        });
    }

    /// Returns a copy with those mappings for which `is_kept` holds.
    pub(super) fn filtered(&self, is_kept: impl Fn(&Mapping) -> bool) -> Self {
        let list: Vec<Mapping> = self.list.iter().filter(|mapping| is_kept(mapping)).cloned().collect();
        let bytes = list.iter().map(|mapping| size_of::<Mapping>() + mapping.path.len()).sum();
        Mappings { list, bytes, is_cut: self.is_cut }
    }

    /// Returns the mapping that contains an address.
    pub(super) fn at(&self, address: u64) -> Option<&Mapping> {
        let after = self.list.partition_point(|mapping| mapping.start <= address);
        self.list[..after].last().filter(|mapping| mapping.holds(address))
    }
}

/// A line of proc_pid_maps(5) about an executable mapping.
pub(super) struct MapsLine<'a> {
    start: u64,
    end: u64,
    offset: u64,
    device: Device,
    inode: u64,
    path: &'a str,
}

impl<'a> MapsLine<'a> {
    /// Parses a line; `None` if the mapping is not executable.
    pub(super) fn parse(line: &'a str) -> Option<Self> {
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let mut words = line.splitn(6, ' ');
        let (start, end) = words.next()?.split_once('-')?;
        if !words.next()?.contains('x') {
            return None;
        }
        let (start, end, offset) = (hex(start)?, hex(end)?, hex(words.next()?)?);
        let (major, minor) = words.next()?.split_once(':')?;
        let device = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
        let inode = words.next()?.parse().ok()?;
        Some(MapsLine { start, end, offset, device, inode, path: words.next().unwrap_or_default().trim_start() })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fmt::Write as _;
    use std::fs::File;
    use std::path::Path;

    use proptest::prelude::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

    use super::*;

    /// A mapping of a program, as a process that runs it has, until it is dropped.
    pub(in crate::offcpu) struct Mapped {
        pub(in crate::offcpu) mapping: Mapping,
        at: *mut std::ffi::c_void,
    }

    pub(in crate::offcpu) const BYTES: usize = 4096;

    impl Mapped {
        pub(in crate::offcpu) fn new(path: &Path) -> Self {
            Self::new_at(path, std::ptr::null_mut(), MapFlags::PRIVATE)
        }

        /// Maps another file at its address.
        pub(in crate::offcpu) fn replace(self, path: &Path) -> Self {
            let replaced = std::mem::ManuallyDrop::new(self);
            Self::new_at(path, replaced.at, MapFlags::PRIVATE | MapFlags::FIXED)
        }

        #[allow(unsafe_code)]
        fn new_at(path: &Path, at: *mut std::ffi::c_void, flags: MapFlags) -> Self {
            let (file, code) = (File::open(path).expect("there"), ProtFlags::READ | ProtFlags::EXEC);
            // SAFETY: memory of its own, wherever the kernel has room for it, or that of a mapping that is forgotten.
            let at = unsafe { mmap(at, BYTES, code, flags, &file, 0) }.expect("it is mapped");
            let maps = io::BufReader::new(File::open("/proc/self/maps").expect("/proc is mounted"));
            let mappings = Mappings::read(maps, &[at.addr() as u64]).expect("it is read");
            Mapped { mapping: mappings.at(at.addr() as u64).expect("it is mapped").clone(), at }
        }
    }

    impl Drop for Mapped {
        #[allow(unsafe_code)]
        fn drop(&mut self) {
            // SAFETY: nothing refers to it.
            unsafe { munmap(self.at, BYTES) }.expect("it was mapped");
        }
    }

    fn read(text: &str, wanted: &[u64]) -> Mappings {
        Mappings::read(text.as_bytes(), wanted).expect("text can be read")
    }

    #[test]
    fn finds_executable_mappings_by_address() {
        let text = "00400000-00401000 r--p 00000000 fe:01 12 /bin/a b\n\
                    00401000-00403000 r-xp 00001000 fe:01 12                      /bin/a b\n\
                    7f0000000000-7f0000001000 rwxp 00000000 00:00 0 \n\
                    7f0000001000-7f0000003000 rwxp 00000000 00:00 0 \n\
                    7ffff0000000-7ffff0002000 r-xp 00000000 00:00 0 [vdso]\n";
        let mappings = read(text, &[]);
        assert_eq!(mappings.list.len(), 3, "adjacent memory without a file is one mapping: {mappings:?}");
        let program = mappings.at(0x40_2fff).expect("it is mapped");
        assert_eq!((program.device, program.inode, &*program.path), ((0xfe, 1), 12, "/bin/a b"));
        assert_eq!(program.offset_of(0x40_1010), 0x1010);
        assert!(mappings.at(0x7f00_0000_2fff).is_some_and(|mapping| mapping.path.is_empty() && mapping.inode == 0));
        assert!([0x40_0000, 0x40_3000, 0, u64::MAX].iter().all(|&at| mappings.at(at).is_none()));
        assert!(!mappings.is_cut);
    }

    #[test]
    fn bounds_memory_and_keeps_wanted_mappings() {
        // The default vm.max_map_count, of files with long paths.
        let line = |number: u64, text: &mut String| {
            let start = 0x10_0000 + number * 0x2000;
            let path = "p".repeat(900);
            writeln!(text, "{start:08x}-{:08x} r-xp 00000000 fe:01 {number} /{number}{path}", start + 0x1000)
        };
        let mut text = String::new();
        (0..65_530).for_each(|number| line(number, &mut text).expect("there is memory"));
        let last = 0x10_0000 + 65_529 * 0x2000 + 8;
        let mappings = read(&text, &[0, last, last + 0x10_0000]);
        assert!(mappings.is_cut && mappings.bytes <= MAX_KEPT + 2_000, "{}", mappings.bytes);
        assert_eq!(mappings.at(last).map(|mapping| mapping.inode), Some(65_529));
        assert!(mappings.at(0x10_0000).is_some() && mappings.at(last - 0x2000).is_none());
        let few = mappings.filtered(|mapping| mapping.holds(last));
        assert!(few.at(last).is_some() && few.list.len() == 1 && few.bytes < 2_000);
    }

    #[test]
    fn mappings_share_path_of_same_file() {
        let mut text = String::new();
        for number in 0..65_530_u64 {
            let start = 0x10_0000 + number * 0x2000;
            writeln!(text, "{start:08x}-{:08x} r-xp 00000000 fe:01 7 /bin/true", start + 0x1000).expect("memory");
        }
        let mappings = read(&text, &[]);
        assert!(!mappings.is_cut && mappings.list.len() == 65_530 && mappings.bytes < 5 << 20, "{}", mappings.bytes);
    }

    #[test]
    fn cuts_endless_maps() {
        let endless = io::BufReader::new(io::repeat(b'x'));
        assert!(Mappings::read(endless, &[]).expect("it is read").is_cut);
        let lines = b"1000-2000 r--p 00000000 00:00 0 \n".iter().copied().cycle().take((MAX_TEXT + 100) as usize);
        let mappings = Mappings::read(io::Cursor::new(lines.collect::<Vec<u8>>()), &[]).expect("it is read");
        assert!(mappings.is_cut && mappings.list.is_empty());
    }

    proptest! {
        #[test]
        fn never_panics_on_arbitrary_maps(text in "([0-9a-f]{0,9}-[0-9a-f]{0,9} r?-?xp [0-9a-f]{0,9} [0-9a-f:]{0,6} [0-9]{0,3} .{0,9}\n?){0,20}") {
            read(&text, &[0]).at(1);
        }
    }
}
