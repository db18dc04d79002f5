// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads a hash map of a program as a whole: one system call for many entries, while reading each key and value takes
//! two per entry.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsRawFd as _;

use libbpf_rs::libbpf_sys::{bpf_map_batch_opts, bpf_map_lookup_batch};
use libbpf_rs::{MapCore, MapType};

/// Maximum number of bytes of entries per call, unless one bucket has more.
const MAX_CALL_BYTES: usize = 64 << 10;

/// Passes each key and its value to `each`. Entries added concurrently may be missing.
///
/// libbpf-rs has an iterator for this, which takes a call that returns less than there is room for as the last one; the
/// kernel does so whenever the next bucket does not fit.
///
/// # Errors
/// Fails if the kernel refuses, or has no memory.
pub(crate) fn each_entry(map: &impl MapCore, each: impl FnMut(&[u8], &[u8])) -> io::Result<()> {
    let room = MAX_CALL_BYTES / (map.key_size() + map.value_size()).max(1) as usize;
    each_with_room(map, room.max(1), each)
}

/// Like [`each_entry`], with at most `room` entries per call, unless one bucket has more.
fn each_with_room(map: &impl MapCore, mut room: usize, mut each: impl FnMut(&[u8], &[u8])) -> io::Result<()> {
    // Other maps have a value for each CPU, or another kind of position.
    if map.map_type() != MapType::Hash {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let (key_bytes, value_bytes) = (map.key_size() as usize, map.value_size() as usize);
    let options = bpf_map_batch_opts { sz: size_of::<bpf_map_batch_opts>() as _, ..Default::default() };
    let (mut keys, mut values) = (vec![0u8; room * key_bytes], vec![0u8; room * value_bytes]);
    // Index of a bucket in the hash table.
    let (mut after, mut next) = (None, 0u32);
    loop {
        let mut count = room as u32;
        let from = after.as_mut().map_or(std::ptr::null_mut(), |after: &mut u32| std::ptr::from_mut(after).cast());
        // SAFETY: there is room for `count` keys and values; for a hash map, the kernel reads and writes one `u32` as
        // the position; all outlive the call.
        let failed = unsafe {
            bpf_map_lookup_batch(
                map.as_fd().as_raw_fd(),
                from,
                (&raw mut next).cast(),
                keys.as_mut_ptr().cast(),
                values.as_mut_ptr().cast(),
                &raw mut count,
                &raw const options,
            )
        };
        let error = (failed != 0).then(io::Error::last_os_error);
        let is_last = match error.as_ref().map(io::Error::raw_os_error) {
            None => false,
            // There is no further bucket; the entries before it have been returned.
            Some(Some(libc::ENOENT)) => true,
            Some(Some(libc::EINTR)) => continue,
            Some(Some(libc::ENOSPC)) => {
                room = room.saturating_mul(2);
                keys.resize(room * key_bytes, 0);
                values.resize(room * value_bytes, 0);
                continue;
            }
            Some(_) => return error.map_or(Ok(()), Err),
        };
        let entries = keys.chunks_exact(key_bytes).zip(values.chunks_exact(value_bytes));
        entries.take(count as usize).for_each(|(key, value)| each(key, value));
        if is_last {
            return Ok(());
        }
        after = Some(next);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use libbpf_rs::libbpf_sys::bpf_map_create_opts;
    use libbpf_rs::{MapFlags, MapHandle, MapType};

    use super::*;

    #[test]
    fn visits_every_entry_once() {
        let options = bpf_map_create_opts { sz: size_of::<bpf_map_create_opts>() as _, ..Default::default() };
        let Ok(map) = MapHandle::create(MapType::Hash, Some("numbers"), 4, 200, 4096, &options) else {
            println!("skipped: maps cannot be made here (run as root)");
            return;
        };
        for entries in [0u32, 1, 300, 3000] {
            for number in 0..entries {
                let value = [number as u8; 200];
                map.update(&number.to_ne_bytes(), &value, MapFlags::ANY).expect("there is room");
            }
            // With this many entries, some share a bucket, which then does not fit.
            for room in [1, 2, 100, 10_000] {
                let mut met = BTreeMap::new();
                each_with_room(&map, room, |key, value| {
                    let number = u32::from_ne_bytes(key.try_into().expect("a number"));
                    assert!(value.iter().all(|&byte| byte == number as u8), "{number}");
                    *met.entry(number).or_insert(0) += 1;
                })
                .expect("it is read");
                assert_eq!(met, (0..entries).map(|number| (number, 1)).collect());
            }
        }
    }

    #[test]
    fn rejects_other_map_types() {
        let options = bpf_map_create_opts { sz: size_of::<bpf_map_create_opts>() as _, ..Default::default() };
        let Ok(map) = MapHandle::create(MapType::PercpuHash, Some("numbers"), 4, 8, 16, &options) else {
            println!("skipped: maps cannot be made here (run as root)");
            return;
        };
        assert!(each_entry(&map, |_, _| {}).is_err());
    }
}
