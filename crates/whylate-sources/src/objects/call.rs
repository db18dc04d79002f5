// SPDX-License-Identifier: MIT OR Apache-2.0
//! Arguments of the system call that a thread waits in, from `/proc/PID/task/TID/syscall` (proc_pid_syscall(5)).

use crate::kernel::syscalls;

/// A system call with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Call {
    pub name: String,
    pub arguments: [u64; 6],
}

/// Which way data goes, as seen from the waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// The waiter reads: a process that can write ends the wait.
    Read,
    /// The waiter writes.
    Write,
    /// Either, or unknown.
    Any,
}

/// What the arguments of a call designate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// A descriptor.
    Descriptor(i32, Direction),
    /// An array of `struct pollfd`, and a timeout.
    Poll { array: u64, count: u64, timeout: Timeout },
    /// Sets of descriptors to read, to write and with exceptions, and a timeout.
    Select { count: u64, sets: [u64; 3], timeout: Timeout },
    /// A descriptor, and the address that it is being connected to.
    Connect { descriptor: i32, address: u64, length: u64 },
    /// A futex: address, operation and expected value.
    Futex { address: u64, operation: u64, expected: u32 },
    /// A child by its PID in the PID namespace of the waiter; `None` for any child.
    Child(Option<u32>),
    /// A System V message queue.
    Queue(u32),
    /// A System V set of semaphores.
    Semaphores(u32),
    /// A path, relative to the working directory or to a directory's descriptor.
    Path { directory: Option<i32>, at: u64 },
    /// A signal.
    Signal,
}

/// Timeout of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Timeout {
    /// In milliseconds; negative for none.
    Milliseconds(i32),
    /// Address of a `struct timespec`; 0 for none.
    Timespec(u64),
}

/// Calls whose first argument is a descriptor that they read.
const READS: &str = "read readv pread64 preadv preadv2 recvfrom recvmsg recvmmsg accept accept4 getdents64 \
                     mq_timedreceive vmsplice epoll_wait epoll_pwait epoll_pwait2 io_uring_enter";
/// Calls whose first argument is a descriptor that they write.
const WRITES: &str = "write writev pwrite64 pwritev pwritev2 sendto sendmsg sendmmsg mq_timedsend ftruncate \
                      fallocate";
/// Calls whose first argument is a descriptor.
const USES: &str = "fsync fdatasync syncfs sync_file_range flock fcntl ioctl fstat fgetxattr fsetxattr fchmod fchown \
                    readahead fadvise64 tee";
/// Calls whose first argument is a path.
const PATHS: &str = "open creat stat lstat access readlink mkdir rmdir unlink chmod chown lchown truncate statfs chdir \
                     rename link utime utimes mknod getxattr lgetxattr setxattr listxattr execve";
/// Calls whose first arguments are the descriptor of a directory and a path relative to it.
const PATHS_AT: &str = "openat openat2 newfstatat statx faccessat faccessat2 readlinkat mkdirat unlinkat fchmodat \
                        fchmodat2 fchownat renameat renameat2 utimensat mknodat execveat name_to_handle_at";

/// `AT_FDCWD` (include/uapi/linux/fcntl.h).
const AT_FDCWD: i32 = -100;
/// `P_PID` of waitid(2).
const P_PID: u64 = 1;
/// `P_PIDFD` of waitid(2).
const P_PIDFD: u64 = 3;

/// The functions that continue a call after a stop, and the call: its number is then that of `restart_syscall`, and its
/// arguments are still there.
const RESTARTED: [(&str, &str); 2] = [("do_restart_poll", "poll"), ("futex_wait_restart", "futex")];

impl Call {
    /// Parses `0 0x3 0x7ffd… 0x1 0x0 0x0 0x0 0x7ffd… 0x7f41…`: the number of the call, six arguments, stack pointer and
    /// program counter. Returns `None` for a running thread, and outside of a system call.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        let number: i32 = words.next()?.parse().ok()?;
        let mut hexadecimal = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
        let mut arguments = [0; 6];
        for argument in &mut arguments {
            *argument = hexadecimal()?;
        }
        // A 32-bit program, which has other numbers, has both below.
        let (stack_pointer, _program_counter) = (hexadecimal()?, hexadecimal()?);
        let is_wide = stack_pointer > u64::from(u32::MAX);
        is_wide.then_some(Call { name: syscalls::name(number)?, arguments })
    }

    /// Returns the call as it was before it was restarted, as its kernel stack shows.
    pub(super) fn before_restart(self, kernel: &[String]) -> Self {
        let of = |name: &str| RESTARTED.iter().find(|(function, _)| name.starts_with(function));
        match kernel.iter().find_map(|frame| of(frame)) {
            Some((_, name)) if self.name == "restart_syscall" => Call { name: (*name).to_owned(), ..self },
            _ => self,
        }
    }

    /// Returns what the call designates; `None` if that is unknown, or not what the call waits for.
    pub(super) fn target(&self) -> Option<Target> {
        let [first, second, third, fourth, fifth, _] = self.arguments;
        let is_in = |names: &str| names.split_ascii_whitespace().any(|name| name == self.name);
        let descriptor = |direction| Some(Target::Descriptor(first as i32, direction));
        match self.name.as_str() {
            _ if is_in(READS) => descriptor(Direction::Read),
            _ if is_in(WRITES) => descriptor(Direction::Write),
            _ if is_in(USES) => descriptor(Direction::Any),
            _ if is_in(PATHS) => Some(Target::Path { directory: None, at: first }),
            _ if is_in(PATHS_AT) => {
                let directory = Some(first as i32).filter(|&directory| directory != AT_FDCWD);
                Some(Target::Path { directory, at: second })
            }
            "poll" => Some(Target::Poll { array: first, count: second, timeout: Timeout::Milliseconds(third as i32) }),
            "ppoll" => Some(Target::Poll { array: first, count: second, timeout: Timeout::Timespec(third) }),
            // Its timeout is in other units, and changes.
            "select" => {
                Some(Target::Select { count: first, sets: [second, third, fourth], timeout: Timeout::Timespec(0) })
            }
            "pselect6" => {
                Some(Target::Select { count: first, sets: [second, third, fourth], timeout: Timeout::Timespec(fifth) })
            }
            "connect" => Some(Target::Connect { descriptor: first as i32, address: second, length: third }),
            "futex" => Some(Target::Futex { address: first, operation: second, expected: third as u32 }),
            "wait4" => Some(Target::Child(u32::try_from(first as i32).ok().filter(|&pid| pid > 0))),
            "waitid" if first == P_PID => Some(Target::Child(Some(second as u32))),
            "waitid" if first == P_PIDFD => Some(Target::Descriptor(second as i32, Direction::Read)),
            "waitid" => Some(Target::Child(None)),
            "msgrcv" | "msgsnd" => Some(Target::Queue(first as u32)),
            "semop" | "semtimedop" => Some(Target::Semaphores(first as u32)),
            "pause" | "rt_sigsuspend" | "rt_sigtimedwait" => Some(Target::Signal),
            _ => None,
        }
    }
}

impl Target {
    /// Returns whether the memory of the process has to be read.
    pub(super) fn is_in_memory(&self) -> bool {
        use Target::{Connect, Futex, Path, Poll, Select};
        matches!(self, Poll { .. } | Select { .. } | Connect { .. } | Futex { .. } | Path { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &str, arguments: [u64; 6]) -> Call {
        Call { name: name.to_owned(), arguments }
    }

    #[test]
    fn parses_number_and_arguments() {
        let text = format!("{} 0x3 0x7ffd0000 0x1 0x0 0x0 0x0 0x7ffd12345678 0x7f4112345678\n", libc::SYS_read);
        assert_eq!(Call::parse(&text), Some(call("read", [3, 0x7ffd_0000, 1, 0, 0, 0])));
        let narrow = "3 0x3 0x7ffd0000 0x1 0x0 0x0 0x0 0xffd12345 0xf7f12345";
        for other in ["running\n", "-1 0x7ffd12345678 0x7f4112345678", "", "0 0x3", narrow, "0 3 0 0 0 0 0 0 0"] {
            assert_eq!(Call::parse(other), None, "{other}");
        }
    }

    #[test]
    fn arguments_designate_what_is_waited_for() {
        let target = |name: &str, arguments| call(name, arguments).target();
        let minus_one = u64::from(u32::MAX);
        assert_eq!(target("read", [3, 0, 0, 0, 0, 0]), Some(Target::Descriptor(3, Direction::Read)));
        assert_eq!(target("sendto", [4, 0, 0, 0, 0, 0]), Some(Target::Descriptor(4, Direction::Write)));
        let poll = Target::Poll { array: 9, count: 2, timeout: Timeout::Milliseconds(-1) };
        assert_eq!(target("poll", [9, 2, minus_one, 0, 0, 0]), Some(poll));
        assert_eq!(target("wait4", [minus_one, 0, 0, 0, 0, 0]), Some(Target::Child(None)));
        assert_eq!(target("wait4", [77, 0, 0, 0, 0, 0]), Some(Target::Child(Some(77))));
        let at = AT_FDCWD as u32;
        let path = Target::Path { directory: None, at: 8 };
        assert_eq!(target("openat", [u64::from(at), 8, 0, 0, 0, 0]), Some(path.clone()));
        assert_eq!(target("openat", [AT_FDCWD as u64, 8, 0, 0, 0, 0]), Some(path));
        assert_eq!(target("sched_yield", [0; 6]), None);
    }

    #[test]
    fn restarted_call_is_the_one_of_its_stack() {
        let restarted = |frame: &str| call("restart_syscall", [1; 6]).before_restart(&[frame.to_owned()]).name;
        assert_eq!(restarted("do_restart_poll"), "poll");
        assert_eq!(restarted("hrtimer_nanosleep_restart"), "restart_syscall");
        assert_eq!(call("read", [1; 6]).before_restart(&["do_restart_poll".to_owned()]).name, "read");
    }
}
