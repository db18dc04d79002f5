// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the arguments of a call point to, in the memory of the process.

use std::time::Duration;

use super::call::Timeout;
use super::sockets::unix_name;
use crate::kernel::process_memory::ProcessMemory;

/// Maximum number of entries of an array of descriptors that are read, and of descriptors in a set.
pub(super) const MAX_POLLED: usize = 64;
/// Highest number of descriptors of select(2).
const MAX_SELECTED: usize = 1024;
const PAGE: u64 = 4096;
/// Size of `struct sockaddr_un`.
const MAX_SOCKADDR: usize = 110;
/// Maximum length of a path, as in Linux.
const MAX_PATH: usize = 4096;

/// Events of poll(2).
const POLLIN: i16 = 0x1;
const POLLOUT: i16 = 0x4;

/// A descriptor that a call waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Polled {
    pub descriptor: i32,
    pub reads: bool,
    pub writes: bool,
}

/// Memory of a process.
pub(super) struct Memory(ProcessMemory);

impl Memory {
    pub(super) fn open(pid: u32) -> Option<Self> {
        ProcessMemory::open(pid).map(Memory)
    }

    fn read<const BYTES: usize>(&self, address: u64) -> Option<[u8; BYTES]> {
        let mut bytes = [0; BYTES];
        self.0.read_exact_at(&mut bytes, address)?;
        Some(bytes)
    }

    /// Reads consecutive 32-bit words.
    pub(super) fn words<const WORDS: usize>(&self, address: u64) -> Option<[u32; WORDS]> {
        let mut words = [0; WORDS];
        for (number, word) in (0..).zip(&mut words) {
            *word = u32::from_ne_bytes(self.read(address.checked_add(number * 4)?)?);
        }
        Some(words)
    }

    /// Reads the array of poll(2), up to [`MAX_POLLED`] entries.
    pub(super) fn polled(&self, array: u64, count: u64) -> Option<Vec<Polled>> {
        let count = usize::try_from(count).ok()?.min(MAX_POLLED);
        let mut bytes = vec![0; count * 8];
        self.0.read_exact_at(&mut bytes, array)?;
        Some(parse_polled(&bytes))
    }

    /// Reads the sets of select(2): descriptors to read, to write and with exceptions.
    pub(super) fn selected(&self, count: u64, sets: [u64; 3]) -> Option<Vec<Polled>> {
        let count = usize::try_from(count).ok()?.min(MAX_SELECTED);
        let mut read = [const { Vec::new() }; 3];
        for (set, address) in read.iter_mut().zip(sets) {
            if address != 0 {
                // Whole words, as the kernel reads them.
                set.resize(count.div_ceil(64) * 8, 0);
                self.0.read_exact_at(set, address)?;
            }
        }
        Some(parse_selected(count, &read))
    }

    /// Reads a text that ends in a zero byte.
    pub(super) fn text(&self, address: u64) -> Option<String> {
        let mut text = Vec::new();
        let mut at = address;
        while text.len() < MAX_PATH {
            let mut bytes = vec![0; (PAGE - at % PAGE) as usize];
            self.0.read_exact_at(&mut bytes, at)?;
            if let Some(end) = bytes.iter().position(|&byte| byte == 0) {
                text.extend(&bytes[..end]);
                return Some(String::from_utf8_lossy(&text).into_owned());
            }
            text.extend(&bytes);
            at = at.checked_add(bytes.len() as u64)?;
        }
        None
    }

    /// Reads the address of a Unix socket: a path, or `@` and the name of an abstract socket.
    pub(super) fn unix_address(&self, address: u64, length: u64) -> Option<String> {
        let mut bytes = vec![0; usize::try_from(length).ok()?.min(MAX_SOCKADDR)];
        self.0.read_exact_at(&mut bytes, address)?;
        let (family, name) = bytes.split_first_chunk()?;
        if i32::from(u16::from_ne_bytes(*family)) != libc::AF_UNIX {
            return None;
        }
        unix_name(name)
    }

    /// Returns a timeout in nanoseconds; `None` if there is none.
    pub(super) fn timeout_ns(&self, timeout: Timeout) -> Option<u64> {
        match timeout {
            Timeout::Milliseconds(ms) => u64::try_from(ms).ok().map(|ms| ms * 1_000_000),
            Timeout::Timespec(0) => None,
            Timeout::Timespec(address) => {
                let [seconds, nanoseconds] =
                    [address, address.checked_add(8)?].map(|at| self.read(at).map(u64::from_ne_bytes));
                let nanoseconds = u32::try_from(nanoseconds?).ok().filter(|&ns| ns < 1_000_000_000)?;
                u64::try_from(Duration::new(seconds?, nanoseconds).as_nanos()).ok()
            }
        }
    }
}

/// Parses entries of `struct pollfd`.
fn parse_polled(bytes: &[u8]) -> Vec<Polled> {
    let entries = bytes.chunks_exact(8).filter_map(|entry| {
        let descriptor = i32::from_ne_bytes(*entry.first_chunk()?);
        let events = i16::from_ne_bytes(*entry.get(4..)?.first_chunk()?);
        let [reads, writes] = [POLLIN, POLLOUT].map(|event| events & event != 0);
        (descriptor >= 0).then_some(Polled { descriptor, reads, writes })
    });
    entries.collect()
}

/// Parses three sets of bits.
fn parse_selected(count: usize, sets: &[Vec<u8>; 3]) -> Vec<Polled> {
    let has = |set: &[u8], at: usize| set.get(at / 8).is_some_and(|byte| byte & 1 << (at % 8) != 0);
    let polled = |at: usize| {
        let [reads, writes, fails] = [0, 1, 2].map(|set: usize| has(&sets[set], at));
        (reads || writes || fails).then_some(Polled { descriptor: at as i32, reads, writes })
    };
    (0..count).filter_map(polled).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> Memory {
        Memory::open(std::process::id()).expect("own memory")
    }

    #[test]
    fn reads_descriptors_of_poll_and_select() {
        let mut bytes = Vec::new();
        for (descriptor, events) in [(5_i32, POLLIN), (-1, POLLIN), (7, POLLOUT)] {
            bytes.extend(descriptor.to_ne_bytes());
            bytes.extend(events.to_ne_bytes());
            bytes.extend([0; 2]);
        }
        let polled = own().polled(bytes.as_ptr() as u64, 3).expect("read");
        let expected = [
            Polled { descriptor: 5, reads: true, writes: false },
            Polled { descriptor: 7, reads: false, writes: true },
        ];
        assert_eq!(polled, expected);
        assert_eq!(own().polled(bytes.as_ptr() as u64, 0), Some(Vec::new()));
        let mut set = [0_u8; 128];
        set[8] = 1 << 2;
        let selected = own().selected(70, [set.as_ptr() as u64, 0, 0]).expect("read");
        assert_eq!(selected, [Polled { descriptor: 66, reads: true, writes: false }]);
    }

    #[test]
    fn reads_texts_and_timeouts() {
        let text = c"/srv/data";
        assert_eq!(own().text(text.as_ptr() as u64).as_deref(), Some("/srv/data"));
        assert_eq!(own().text(8), None);
        let time = [1_u64, 500_000_000];
        assert_eq!(own().timeout_ns(Timeout::Timespec(time.as_ptr() as u64)), Some(1_500_000_000));
        assert_eq!(own().timeout_ns(Timeout::Milliseconds(-1)), None);
        assert_eq!(own().timeout_ns(Timeout::Milliseconds(20)), Some(20_000_000));
        let wrong = [u64::MAX, u64::MAX];
        assert_eq!(own().timeout_ns(Timeout::Timespec(wrong.as_ptr() as u64)), None);
    }
}
