// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of system calls.

use syscalls::Sysno;

/// Returns the name of a system call of this architecture; `None` if the number is invalid.
pub fn name(number: i32) -> Option<String> {
    let number = usize::try_from(number).ok()?;
    Sysno::new(number).map(|call| call.name().to_owned())
}

#[cfg(test)]
mod tests {
    use ::syscalls::SysnoSet;
    use whylate_model::wait::of_syscall;

    use super::*;

    #[test]
    fn names_system_calls() {
        assert_eq!(name(libc::SYS_futex as i32).as_deref(), Some("futex"));
        assert_eq!(name(-1), None);
        assert_eq!(name(i32::MAX), None);
    }

    /// A new system call has to be classified: what a thread waits for in it decides whether it is idle.
    #[test]
    fn each_system_call_is_classified() {
        let names = SysnoSet::all();
        let unknown: Vec<&str> =
            names.iter().map(|call| call.name()).filter(|name| of_syscall(name).is_none()).collect();
        assert!(names.iter().count() > 300 && unknown.is_empty(), "{unknown:?}");
    }
}
