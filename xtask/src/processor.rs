// SPDX-License-Identifier: MIT OR Apache-2.0
//! The processor architectures of the kernels, and the machine that QEMU emulates for each.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context, Result};

/// Offset and value of the magic number in an arm64 kernel image (Documentation/arch/arm64/booting.rst).
const ARM64_AT: usize = 56;
const ARM64: [u8; 4] = *b"ARM\x64";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Processor {
    X86,
    Arm64,
}

impl Processor {
    /// Detects the architecture of a kernel image.
    pub fn detect(image: &Path) -> Result<Self> {
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

    /// Returns QEMU's options for the processor and the board. Real pointer authentication is very slow to emulate.
    pub fn machine(self) -> &'static [&'static str] {
        match self {
            Processor::X86 => &["-cpu", "max"],
            Processor::Arm64 => &["-M", "virt,gic-version=3", "-cpu", "max,pauth-impdef=on"],
        }
    }

    /// Returns the kernel's name of its first serial line, the console.
    pub fn console(self) -> &'static str {
        match self {
            Processor::X86 => "ttyS0",
            Processor::Arm64 => "ttyAMA0",
        }
    }

    /// Returns QEMU's options for the command's serial line, and the kernel's name of it. The arm64 machine has one
    /// serial line only.
    pub fn line(self) -> (&'static [&'static str], &'static str) {
        match self {
            Processor::X86 => (&["-serial", "stdio"], "ttyS1"),
            Processor::Arm64 => (
                &["-chardev", "stdio,id=line", "-device", "virtio-serial-pci", "-device", "virtconsole,chardev=line"],
                "hvc0",
            ),
        }
    }

    /// Returns the make target of the static program, and its path in the build directory.
    pub fn whylate(self) -> (&'static str, &'static str) {
        match self {
            Processor::X86 => ("static", "static/whylate"),
            Processor::Arm64 => ("static-arm64", "static/whylate-arm64"),
        }
    }

    /// Returns whether the host's programs run on it.
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
    fn image_reveals_its_architecture() -> Result<()> {
        let directory = tempfile::tempdir()?;
        let image = directory.path().join("vmlinuz");
        let mut bytes = vec![0; 100];
        fs::write(&image, &bytes)?;
        assert_eq!(Processor::detect(&image)?, Processor::X86);
        bytes[56..60].copy_from_slice(b"ARMd");
        fs::write(&image, &bytes)?;
        assert_eq!(Processor::detect(&image)?, Processor::Arm64);
        fs::write(&image, b"short")?;
        assert_eq!(Processor::detect(&image)?, Processor::X86);
        Ok(())
    }
}
