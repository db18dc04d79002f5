// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tries whether the kernel accepts a BPF program or a map. libbpf's own probes hide the error, which alone
//! distinguishes a missing privilege from a missing feature.

use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;

use libbpf_rs::{Error, MapHandle, MapType, ProgramType, Result, libbpf_sys};

/// `BPF_F_SLEEPABLE`.
const SLEEPABLE: u32 = 1 << 4;

/// Way of loading a program.
#[derive(Clone, Copy, Debug)]
pub(super) enum Attempt {
    /// Loads with only the type.
    Plain,
    /// Loads as a sleepable program.
    Sleepable,
    /// Loads for this type ID of the kernel's BTF.
    At { type_id: u32, attach_type: u32 },
}

/// Loads a program that returns 0, and closes it. It is never attached.
#[expect(unsafe_code, reason = "libbpf-rs has no way to load single instructions")]
pub(super) fn load_program(kind: ProgramType, attempt: Attempt) -> Result<()> {
    let mut options =
        libbpf_sys::bpf_prog_load_opts { sz: size_of::<libbpf_sys::bpf_prog_load_opts>() as _, ..Default::default() };
    match attempt {
        Attempt::Plain => {}
        Attempt::Sleepable => options.prog_flags = SLEEPABLE,
        Attempt::At { type_id, attach_type } => {
            options.attach_btf_id = type_id;
            options.expected_attach_type = attach_type;
        }
    }
    let instruction = |code| libbpf_sys::bpf_insn { code, ..Default::default() };
    let mov64_imm = libbpf_sys::BPF_ALU64 | libbpf_sys::BPF_MOV | libbpf_sys::BPF_K;
    let exit = libbpf_sys::BPF_JMP | libbpf_sys::BPF_EXIT;
    let program = [instruction(mov64_imm as u8), instruction(exit as u8)];
    // SAFETY: the license is a C string, the instructions and their count belong together, the options carry their own
    // size, and all of them outlive the call. The kernel checks the program itself.
    let result = unsafe {
        libbpf_sys::bpf_prog_load(
            kind as u32,
            ptr::null(),
            c"GPL".as_ptr(),
            program.as_ptr(),
            program.len() as _,
            &mut options,
        )
    };
    if result < 0 {
        return Err(Error::from_raw_os_error(-result));
    }
    // SAFETY: a file descriptor that the call above created, with no other owner.
    drop(unsafe { OwnedFd::from_raw_fd(result) });
    Ok(())
}

/// Creates a map with one element, and closes it.
pub(super) fn make_map(kind: MapType) -> Result<()> {
    let options =
        libbpf_sys::bpf_map_create_opts { sz: size_of::<libbpf_sys::bpf_map_create_opts>() as _, ..Default::default() };
    let (key_bytes, value_bytes, entries) = match kind {
        // The size in bytes: a power of two and a multiple of any page.
        MapType::RingBuf => (0, 0, 1 << 16),
        // A stack of one address.
        MapType::StackTrace => (4, 8, 1),
        _ => (4, 4, 1),
    };
    MapHandle::create(kind, None::<&str>, key_bytes, value_bytes, entries, &options).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_program_and_map_fail() {
        // As root the type is wrong, and otherwise the privilege is missing.
        assert!(load_program(ProgramType::Tracing, Attempt::At { type_id: u32::MAX, attach_type: 0 }).is_err());
        assert!(make_map(MapType::Unspec).is_err());
    }
}
