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
    use ::syscalls::SysnoSet;
    use whylate_model::wait::of_syscall;

    use super::*;

    #[test]
    fn numbers_have_names() {
        assert_eq!(name(libc::SYS_futex as i32).as_deref(), Some("futex"));
        assert_eq!(name(-1), None);
        assert_eq!(name(i32::MAX), None);
    }

    /// A call that is new here has to be given its place: what a thread waits for in it decides whether it is idle.
    #[test]
    fn each_system_call_of_the_table_says_what_it_waits_for() {
        let names = SysnoSet::all();
        let unknown: Vec<&str> =
            names.iter().map(|call| call.name()).filter(|name| of_syscall(name).is_none()).collect();
        assert!(names.iter().count() > 300 && unknown.is_empty(), "{unknown:?}");
    }
}
