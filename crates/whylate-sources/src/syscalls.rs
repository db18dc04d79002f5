// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of system calls.

use syscalls::Sysno;

/// The name of a system call of this architecture; `None` when the number is none.
pub fn name(number: i32) -> Option<String> {
    let number = usize::try_from(number).ok()?;
    Sysno::new(number).map(|call| call.name().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_names() {
        assert_eq!(name(libc::SYS_futex as i32).as_deref(), Some("futex"));
        assert_eq!(name(-1), None);
        assert_eq!(name(i32::MAX), None);
    }
}
