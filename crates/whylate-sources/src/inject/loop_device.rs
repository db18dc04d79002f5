// SPDX-License-Identifier: MIT OR Apache-2.0
//! A file as a loop device, which is removed when it is closed.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;

use anyhow::anyhow;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Setter, ioctl, opcode};

use crate::AttachError;

/// `LOOP_CTL_GET_FREE` and `LOOP_CONFIGURE` (include/uapi/linux/loop.h), which encode no size.
const GET_FREE: Opcode = opcode::none(b'L', 0x82);
const CONFIGURE: Opcode = opcode::none(b'L', 0x0a);

/// `LO_FLAGS_AUTOCLEAR`: the kernel removes the device when it is closed, also if the process is killed.
const AUTOCLEAR: u32 = 4;
/// `LO_FLAGS_DIRECT_IO`: bypasses the page cache. The kernel clears it if the file has no direct I/O.
const DIRECT_IO: u32 = 16;

/// Maximum number of attempts, as another process may take the free device first.
const TRIES: u32 = 16;

/// `struct loop_info64`
#[repr(C)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<Config>() == 304);

impl Config {
    fn for_file(file: &File) -> Config {
        let info = Info {
            device: 0,
            inode: 0,
            rdevice: 0,
            offset: 0,
            size_limit: 0,
            number: 0,
            encrypt_type: 0,
            encrypt_key_size: 0,
            flags: AUTOCLEAR | DIRECT_IO,
            file_name: [0; 64],
            crypt_name: [0; 64],
            encrypt_key: [0; 32],
            init: [0; 2],
        };
        // The kernel uses the block size of the file's disk.
        Config { fd: file.as_raw_fd() as u32, block_size: 0, info, reserved: [0; 8] }
    }
}

/// Asks for the number of an unused loop device; the kernel creates one if all are used.
struct GetFree;

// SAFETY: LOOP_CTL_GET_FREE takes no argument, writes no memory, and returns a number.
unsafe impl Ioctl for GetFree {
    type Output = IoctlOutput;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        GET_FREE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(number: IoctlOutput, _: *mut c_void) -> rustix::io::Result<IoctlOutput> {
        Ok(number)
    }
}

/// Returns a loop device over the file, open for direct I/O, and its name in `/dev`.
pub(super) fn over(file: &File) -> Result<(File, String), AttachError> {
    let control = OpenOptions::new().read(true).write(true).open("/dev/loop-control").map_err(cannot)?;
    for _ in 0..TRIES {
        // SAFETY: as for the implementation of `Ioctl`.
        let number = unsafe { ioctl(&control, GetFree) }.map_err(|error| cannot(error.into()))?;
        let name = format!("loop{number}");
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        let device = options.open(format!("/dev/{name}")).map_err(cannot)?;
        // SAFETY: LOOP_CONFIGURE reads a `struct loop_config`, as `Config` is one.
        let configured = unsafe { ioctl(&device, Setter::<CONFIGURE, Config>::new(Config::for_file(file))) };
        match configured {
            Ok(()) => return Ok((device, name)),
            Err(rustix::io::Errno::BUSY) => {}
            Err(error) => return Err(cannot(error.into())),
        }
    }
    Err(anyhow!("cannot make a loop device: other programs took every free one (try again)").into())
}

/// Maps errors: no driver (its module is not loaded), or missing privileges.
fn cannot(error: io::Error) -> AttachError {
    match error.kind() {
        io::ErrorKind::NotFound => {
            AttachError::Unsupported("there are no loop devices here (load the module: `modprobe loop`)".to_owned())
        }
        io::ErrorKind::PermissionDenied => {
            AttachError::Unsupported("cannot make a loop device: not permitted (run as root)".to_owned())
        }
        _ => anyhow!(error).context("cannot make a loop device").into(),
    }
}
