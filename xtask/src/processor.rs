// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kinds of processor that kernels are for, and the machine that QEMU makes of each.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context, Result};

/// Where a kernel's image of arm64 says that it is one (Documentation/arch/arm64/booting.rst), and how.
const ARM64_AT: usize = 56;
const ARM64: [u8; 4] = *b"ARM\x64";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Processor {
    X86,
    Arm64,
}

impl Processor {
    /// The one that a kernel's image is for.
    pub fn of(image: &Path) -> Result<Self> {
        let mut begin = Vec::new();
        let file = File::open(image).and_then(|file| file.take(1 << 10).read_to_end(&mut begin));
        file.with_context(|| format!("cannot read {}", image.display()))?;
        let is_arm64 = begin.get(ARM64_AT..).is_some_and(|rest| rest.starts_with(&ARM64));
        Ok(if is_arm64 { Processor::Arm64 } else { Processor::X86 })
    }

    pub fn qemu(self) -> &'static str {
        match self {
            Processor::X86 => "qemu-system-x86_64",
            Processor::Arm64 => "qemu-system-aarch64",
        }
    }

    /// QEMU's options for the processor and what is around it. Authenticating pointers as a real arm64 processor does
    /// takes longer than all the rest.
    pub fn machine(self) -> &'static [&'static str] {
        match self {
            Processor::X86 => &["-cpu", "max"],
            Processor::Arm64 => &["-M", "virt,gic-version=3", "-cpu", "max,pauth-impdef=on"],
        }
    }

    /// The kernel's name of its first serial line, which is its console.
    pub fn console(self) -> &'static str {
        match self {
            Processor::X86 => "ttyS0",
            Processor::Arm64 => "ttyAMA0",
        }
    }

    /// QEMU's options for the line of the command, and the kernel's name of it. The arm64 machine has one serial line.
    pub fn line(self) -> (&'static [&'static str], &'static str) {
        match self {
            Processor::X86 => (&["-serial", "stdio"], "ttyS1"),
            Processor::Arm64 => (
                &["-chardev", "stdio,id=line", "-device", "virtio-serial-pci", "-device", "virtconsole,chardev=line"],
                "hvc0",
            ),
        }
    }

    /// What makes the static program, and where it then is in the build folder.
    pub fn whylate(self) -> (&'static str, &'static str) {
        match self {
            Processor::X86 => ("static", "static/whylate"),
            Processor::Arm64 => ("static-arm64", "static/whylate-arm64"),
        }
    }

    /// Whether programs of this machine run on it.
    pub fn is_this(self) -> bool {
        match self {
            Processor::X86 => cfg!(target_arch = "x86_64"),
            Processor::Arm64 => cfg!(target_arch = "aarch64"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn an_image_tells_what_it_is_for() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let image = folder.path().join("vmlinuz");
        let mut bytes = vec![0; 100];
        fs::write(&image, &bytes)?;
        assert_eq!(Processor::of(&image)?, Processor::X86);
        bytes[56..60].copy_from_slice(b"ARMd");
        fs::write(&image, &bytes)?;
        assert_eq!(Processor::of(&image)?, Processor::Arm64);
        fs::write(&image, b"short")?;
        assert_eq!(Processor::of(&image)?, Processor::X86);
        Ok(())
    }
}
