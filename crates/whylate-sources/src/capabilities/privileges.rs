// SPDX-License-Identifier: MIT OR Apache-2.0
//! Privileges of this process, and the settings that restrict it.

use super::{Fact, State, read_line};
use crate::kernel::credentials::in_initial_user_namespace;

const LOCKDOWN: &str = "/sys/kernel/security/lockdown";

/// A capability that whylate uses.
struct Used {
    bit: u32,
    name: &'static str,
    /// What does not work without it.
    loss: &'static str,
    /// Bit and name of another capability that includes it.
    included_in: Option<(u32, &'static str)>,
}

const SYS_ADMIN: (u32, &str) = (21, "CAP_SYS_ADMIN");

/// The capabilities that whylate uses, the most important one first.
const USED: [Used; 10] = [
    Used {
        bit: 39,
        name: "CAP_BPF",
        loss: "no BPF program loads: the overview and run measure nothing",
        included_in: Some(SYS_ADMIN),
    },
    Used {
        bit: 38,
        name: "CAP_PERFMON",
        loss: "no BPF program may read the kernel: the overview and run measure nothing",
        included_in: Some(SYS_ADMIN),
    },
    Used {
        bit: SYS_ADMIN.0,
        name: SYS_ADMIN.1,
        loss: "offcpu --backend proc reads no kernel stacks, and code of other BPF programs may have an old name",
        included_in: None,
    },
    Used {
        bit: 34,
        name: "CAP_SYSLOG",
        loss: "no addresses of kernel functions: irqsoff measures only --timers, wq --why and other commands \
               cannot distinguish disabled interrupts from running threads, and kernel stacks have addresses \
               instead of names",
        included_in: None,
    },
    Used {
        bit: 23,
        name: "CAP_SYS_NICE",
        loss: "no real-time threads: timerlat refuses without -P o:0 and inject hog without --policy normal, and the \
               overview has no timer latency",
        included_in: None,
    },
    Used {
        bit: 19,
        name: "CAP_SYS_PTRACE",
        loss: "sqpoll --backend fdinfo does not read the rings of processes of other users or with more capabilities",
        included_in: None,
    },
    Used {
        bit: 40,
        name: "CAP_CHECKPOINT_RESTORE",
        loss: "offcpu does not name functions of programs that were deleted while they run",
        included_in: Some(SYS_ADMIN),
    },
    Used {
        bit: 2,
        name: "CAP_DAC_READ_SEARCH",
        loss: "offcpu does not name functions of programs that only another user can read, and users other than root \
               do not read tracefs",
        included_in: Some((1, "CAP_DAC_OVERRIDE")),
    },
    Used {
        bit: 14,
        name: "CAP_IPC_LOCK",
        loss: "beyond ulimit -l, whylate's memory may be paged out, which adds to timerlat's latencies",
        included_in: None,
    },
    Used { bit: 24, name: "CAP_SYS_RESOURCE", loss: "nothing is lost from Linux 5.11 on", included_in: None },
];

/// Privileges of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Privileges {
    /// Effective user ID.
    pub uid: u32,
    /// False inside a user namespace, where capabilities do not apply to the kernel as a whole; `None` if unknown.
    pub in_first_user_namespace: Option<bool>,
    /// Relevant capabilities.
    pub capabilities: Vec<Privilege>,
}

impl Privileges {
    /// Returns the meaning of EPERM or EACCES, with which the kernel refuses a BPF program or map.
    pub(super) fn refusal(&self) -> Fact {
        if self.in_first_user_namespace == Some(false) {
            return Fact::unknown("not permitted in a user namespace (run as root outside of it)");
        }
        if self.may_trace() {
            // Lockdown, a BPF program of a security module, or a seccomp filter: the error does not show which.
            return Fact::no(
                "refused despite the capabilities (a security policy of this machine or container has to allow it)",
            );
        }
        Fact::unknown("not permitted (run as root, or grant CAP_BPF and CAP_PERFMON)")
    }

    /// Tests whether the kernel lets this process load tracing programs, as far as its capabilities show.
    pub fn may_trace(&self) -> bool {
        // Without /proc the capabilities are unknown, but root usually has them.
        let is = |state: State| match state {
            State::Yes => true,
            State::No => false,
            State::Unknown => self.uid == 0,
        };
        let has = |name| self.capabilities.iter().any(|one| one.name == name && is(one.state));
        self.in_first_user_namespace != Some(false) && (has("CAP_SYS_ADMIN") || has("CAP_BPF") && has("CAP_PERFMON"))
    }
}

/// A capability, effective or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Privilege {
    /// Name, as in `capabilities(7)`.
    pub name: &'static str,
    /// Whether the capability is effective.
    pub state: State,
    /// What does not work without the capability.
    pub loss: String,
}

/// A kernel setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sysctl {
    /// Name, as `sysctl` takes it.
    pub name: &'static str,
    /// Value; `None` if it is absent or not readable.
    pub value: Option<i64>,
    /// Meaning of the value, or why there is none.
    pub detail: String,
}

pub(super) fn probe() -> Privileges {
    let status = read_line("/proc/self/status");
    Privileges {
        uid: rustix::process::geteuid().as_raw(),
        in_first_user_namespace: in_initial_user_namespace(),
        capabilities: privileges(status.ok().and_then(|status| effective(&status))),
    }
}

/// Parses the effective set in the text of `/proc/self/status`.
fn effective(status: &str) -> Option<u64> {
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

fn privileges(effective: Option<u64>) -> Vec<Privilege> {
    let has = |bit: u32| effective.is_some_and(|mask| mask & (1 << bit) != 0);
    let state = |bit: u32| match effective {
        Some(_) if has(bit) => State::Yes,
        Some(_) => State::No,
        None => State::Unknown,
    };
    let of = |used: &Used| {
        let loss = match used.included_in {
            Some((bit, name)) if has(bit) => format!("nothing is lost, because {name} is in effect"),
            _ => used.loss.to_owned(),
        };
        Privilege { name: used.name, state: state(used.bit), loss }
    };
    USED.iter().map(of).collect()
}

/// Determines the lockdown mode. `built_in`: whether the kernel has lockdown, if known.
pub(super) fn probe_lockdown(built_in: Option<bool>) -> Fact {
    lockdown(read_line(LOCKDOWN), built_in)
}

/// Parses the list of modes with the current one in brackets.
fn lockdown(modes: Result<String, String>, built_in: Option<bool>) -> Fact {
    let modes = match (modes, built_in) {
        (Ok(modes), _) => modes,
        (Err(_), Some(false)) => return Fact::no("not in this kernel"),
        (Err(why), _) => {
            return Fact::unknown(format!(
                "{why} (to see it, as root: mount -t securityfs securityfs /sys/kernel/security)"
            ));
        }
    };
    match modes.split_once('[').and_then(|(_, rest)| Some(rest.split_once(']')?.0)) {
        Some("none") => Fact::no("not in force"),
        // Refused since 5.4: LOCKDOWN_BPF_READ_KERNEL, LOCKDOWN_PERF, LOCKDOWN_TRACEFS, LOCKDOWN_KPROBES.
        Some("confidentiality") => Fact::yes(
            "confidentiality: BPF may not read kernel memory, tracefs is closed (boot with lockdown=integrity or without)",
        ),
        Some("integrity") => Fact::yes("integrity: BPF may read kernel memory; most files of debugfs are closed"),
        Some(other) => Fact::yes(other),
        None => Fact::unknown(format!("{LOCKDOWN} has no mode in force")),
    }
}

pub(super) fn probe_sysctls() -> Vec<Sysctl> {
    const NAMES: [&str; 4] = [
        "kernel.unprivileged_bpf_disabled",
        "kernel.bpf_stats_enabled",
        "kernel.kptr_restrict",
        "kernel.perf_event_paranoid",
    ];
    let read = |name: &'static str| sysctl(name, read_line(&format!("/proc/sys/{}", name.replace('.', "/"))));
    NAMES.into_iter().map(read).collect()
}

fn sysctl(name: &'static str, content: Result<String, String>) -> Sysctl {
    match content.map(|text| text.parse::<i64>().map_err(|_| text)) {
        Ok(Ok(value)) => Sysctl { name, value: Some(value), detail: meaning(name, value).to_owned() },
        Ok(Err(text)) => Sysctl { name, value: None, detail: format!("not a number: {text}") },
        Err(why) => Sysctl { name, value: None, detail: why },
    }
}

fn meaning(name: &str, value: i64) -> &'static str {
    match (name, value) {
        ("kernel.unprivileged_bpf_disabled", 0) => "any user may load some BPF programs; tracing ones need CAP_PERFMON",
        ("kernel.unprivileged_bpf_disabled", _) => "BPF needs CAP_BPF",
        ("kernel.bpf_stats_enabled", 0) => "the kernel does not count the run time of BPF programs",
        ("kernel.bpf_stats_enabled", _) => {
            "the kernel counts the run time of BPF programs, which makes each run slower"
        }
        ("kernel.kptr_restrict", 0 | 1) => "kernel addresses have names for those with CAP_SYSLOG",
        ("kernel.kptr_restrict", _) => "kernel addresses have no names (set 1 to have them)",
        ("kernel.perf_event_paranoid", value) if value <= 1 => "any user may measure the kernel with perf events",
        ("kernel.perf_event_paranoid", _) => "perf events of the kernel need CAP_PERFMON",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn with(mask: u64, in_first_user_namespace: Option<bool>) -> Privileges {
        Privileges { uid: 0, in_first_user_namespace, capabilities: privileges(Some(mask)) }
    }

    #[test]
    fn reads_effective_capabilities() {
        let status = "Name:\tx\nCapPrm:\t000001ffffffffff\nCapEff:\t000001fffeffffff\n";
        let mask = effective(status);
        assert_eq!(mask, Some(0x1ff_feff_ffff));
        let missing: Vec<_> =
            privileges(mask).into_iter().filter(|one| one.state == State::No).map(|one| one.name).collect();
        assert_eq!(missing, ["CAP_SYS_RESOURCE"]);
        assert!(privileges(effective("")).iter().all(|one| one.state == State::Unknown));
    }

    #[test]
    fn nothing_is_lost_with_a_capability_that_includes_the_missing_one() {
        let loss_of_bpf =
            |mask: u64| privileges(Some(mask)).into_iter().find(|one| one.name == "CAP_BPF").map(|one| one.loss);
        assert!(loss_of_bpf(1 << 21).is_some_and(|loss| loss == "nothing is lost, because CAP_SYS_ADMIN is in effect"));
        assert!(loss_of_bpf(0).is_some_and(|loss| loss.contains("measure nothing")));
    }

    #[test]
    fn tracing_needs_bpf_and_perfmon_or_sys_admin() {
        assert!(with(1 << 39 | 1 << 38, Some(true)).may_trace());
        assert!(with(1 << 21, None).may_trace());
        assert!(!with(1 << 39, Some(true)).may_trace());
        assert!(!with(u64::MAX, Some(false)).may_trace());
        let without_proc = |uid| Privileges { uid, in_first_user_namespace: None, capabilities: privileges(None) };
        assert!(without_proc(0).may_trace() && !without_proc(1).may_trace());
    }

    #[test]
    fn refusal_depends_on_capabilities() {
        assert_eq!(with(u64::MAX, Some(true)).refusal().state, State::No);
        assert_eq!(with(0, Some(true)).refusal().state, State::Unknown);
        assert!(with(u64::MAX, Some(false)).refusal().detail.contains("user namespace"));
    }

    #[test]
    fn parses_lockdown_mode() {
        let of = |text: &str| lockdown(Ok(text.to_owned()), None).state;
        assert_eq!(of("[none] integrity confidentiality"), State::No);
        assert_eq!(of("none [integrity] confidentiality"), State::Yes);
        assert_eq!(of("none integrity [confidentiality]"), State::Yes);
        assert_eq!(of("none"), State::Unknown);
        let absent = || Err("it is absent".to_owned());
        assert_eq!(lockdown(absent(), Some(false)).state, State::No);
        assert_eq!(lockdown(absent(), Some(true)).state, State::Unknown);
        assert_eq!(lockdown(absent(), None).state, State::Unknown);
    }

    #[test]
    fn describes_sysctl_values() {
        let restricted = sysctl("kernel.kptr_restrict", Ok("2".to_owned()));
        assert_eq!(restricted.value, Some(2));
        assert!(restricted.detail.contains("set 1"));
        assert_eq!(sysctl("kernel.kptr_restrict", Err("absent".to_owned())).detail, "absent");
        assert!(probe_sysctls().iter().all(|one| !one.detail.is_empty()));
    }

    proptest! {
        #[test]
        fn never_panics_on_any_text(text in ".*", mask in any::<u64>()) {
            effective(&text);
            effective(&format!("CapEff:{text}"));
            privileges(Some(mask));
            lockdown(Ok(text.clone()), None);
            lockdown(Ok(format!("[{text}")), None);
            sysctl("kernel.kptr_restrict", Ok(text));
        }
    }
}
