// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders the capabilities of this kernel as text.

use std::io::{self, Write};

use whylate_model::units::printable;
use whylate_sources::capabilities::{
    Btf, Capabilities, ClockSource, CpuList, Cpus, Fact, Kernel, Privileges, Readiness, State, Sysctl, Tracefs,
};

use crate::render::text::pad::{Left, Spaces};
use crate::terminal::wrapped;

/// Minimum width of a cell that is broken into lines.
const MIN_WIDTH: usize = 30;

/// Writes a verdict, a table of the sources, and two columns of facts. Long cells continue below themselves.
pub fn write(found: &Capabilities, columns: Option<usize>, out: &mut impl Write) -> io::Result<()> {
    let columns = columns.unwrap_or(usize::MAX);
    verdict(found, out)?;
    writeln!(out)?;
    sources(found.sources.iter().chain([&found.causes]).chain(&found.injections), columns, out)?;
    writeln!(out)?;
    let mut rows = vec![
        ("kernel", kernel(&found.kernel)),
        ("BTF", btf(&found.btf)),
        ("tracefs", at(&found.tracefs.fact, found.tracefs.path.as_deref())),
        ("tracers", tracers(&found.tracefs)),
    ];
    rows.extend(found.bpf.each().map(|(_, label, fact)| (label, sentence(fact))));
    rows.push(("user", user(&found.privileges)));
    rows.extend(capabilities(&found.privileges));
    rows.push(("lockdown", sentence(&found.lockdown)));
    rows.extend(found.sysctls.iter().map(|one| (one.name, sysctl(one))));
    rows.push(("clock source", clock_source(&found.clock_source)));
    rows.push(("CPUs", cpus(&found.cpus)));
    rows.extend(found.cpus.left_out.iter().map(|left_out| ("", left_out.clone())));
    rows.push(("hypervisor", sentence(&found.hypervisor)));

    let width = rows.iter().map(|(label, _)| label.len()).max().unwrap_or(0);
    for (label, value) in rows {
        write_cell(out, &format!("{}  ", Left(label, width)), &printable(&value), columns)?;
    }
    Ok(())
}

/// Counts the sources that measure here, and those that would measure better with another backend.
fn verdict(found: &Capabilities, out: &mut impl Write) -> io::Result<()> {
    let all = found.sources.len();
    let measuring: Vec<&Readiness> = found.sources.iter().filter(|source| source.state == State::Yes).collect();
    let less = measuring.iter().filter(|source| !source.better.is_empty()).count();
    let verdict = if measuring.len() == all { "ok" } else { "limited" };
    let better = if less == 0 { String::new() } else { format!("; {less} of them could measure better") };
    writeln!(out, "{verdict}: {} of {all} sources measure here{better}", measuring.len())
}

/// Writes a cell behind the cells of its row; lines that do not fit continue below.
fn write_cell(out: &mut impl Write, before: &str, text: &str, columns: usize) -> io::Result<()> {
    let indent = before.chars().count();
    for (number, line) in wrapped(text, columns.saturating_sub(indent).max(MIN_WIDTH)).iter().enumerate() {
        match number {
            0 => writeln!(out, "{before}{line}")?,
            _ => writeln!(out, "{}{line}", Spaces(indent))?,
        }
    }
    Ok(())
}

fn kernel(kernel: &Kernel) -> String {
    let release = kernel.release.as_deref().unwrap_or("unknown release");
    format!("{release} {}, {}", kernel.arch, kernel.preemption)
}

fn btf(btf: &Btf) -> String {
    let text = at(&btf.fact, Some(btf.path));
    match btf.size_bytes {
        Some(size_bytes) if btf.fact.is_yes() => format!("{text} ({:.1} MB)", size_bytes as f64 / 1e6),
        _ => text,
    }
}

fn tracers(tracefs: &Tracefs) -> String {
    match &tracefs.tracers {
        Some(names) if names.is_empty() => "none".to_owned(),
        Some(names) => names.join(" "),
        None => "unknown: tracefs is not readable".to_owned(),
    }
}

fn user(privileges: &Privileges) -> String {
    let namespace = match privileges.in_first_user_namespace {
        Some(true) => "",
        Some(false) => ", in a user namespace (capabilities do not hold for BPF there)",
        None => ", user namespace unknown",
    };
    format!("uid {}{namespace}", privileges.uid)
}

/// Returns a row of the effective capabilities, and a row for each missing one.
fn capabilities(privileges: &Privileges) -> Vec<(&'static str, String)> {
    let of = |state: State| privileges.capabilities.iter().filter(move |one| one.state == state);
    let in_effect: Vec<&str> = of(State::Yes).map(|one| one.name).collect();
    if of(State::Unknown).next().is_some() {
        return vec![("capabilities", "unknown: /proc/self/status is not readable".to_owned())];
    }
    let first = if in_effect.is_empty() { "none".to_owned() } else { in_effect.join(" ") };
    let missing = of(State::No).map(|one| ("", format!("without {}: {}", one.name, one.loss)));
    [("capabilities", first)].into_iter().chain(missing).collect()
}

fn sysctl(sysctl: &Sysctl) -> String {
    match sysctl.value {
        Some(value) if sysctl.detail.is_empty() => value.to_string(),
        Some(value) => format!("{value}: {}", sysctl.detail),
        None => format!("unknown: {}", sysctl.detail),
    }
}

fn clock_source(clock: &ClockSource) -> String {
    let current = clock.current.as_deref().unwrap_or("unknown");
    let slow = if clock.is_slow() { " (slow: every time stamp costs a microsecond or more)" } else { "" };
    format!("{current}{slow}; available: {}", or_none(&clock.available.join(" ")))
}

fn cpus(cpus: &Cpus) -> String {
    let counted = |cpus: &Option<CpuList>| match cpus {
        Some(CpuList { list, count: Some(count) }) => format!("{count} ({})", or_none(list)),
        Some(CpuList { list, count: None }) => list.clone(),
        None => "unknown".to_owned(),
    };
    let listed = |cpus: &Option<CpuList>, absent: &str| match cpus {
        Some(cpus) => or_none(&cpus.list).to_owned(),
        None => absent.to_owned(),
    };
    format!(
        "online {}, possible {}, isolated {}, nohz_full {}",
        counted(&cpus.online),
        counted(&cpus.possible),
        listed(&cpus.isolated, "unknown"),
        // The kernel leaves the file out when it is built without CONFIG_NO_HZ_FULL.
        listed(&cpus.nohz_full, if cpus.online.is_some() { "not in this kernel" } else { "unknown" }),
    )
}

fn or_none(text: &str) -> &str {
    if text.is_empty() { "none" } else { text }
}

/// Renders a fact with its path.
fn at(fact: &Fact, place: Option<&str>) -> String {
    match (fact.state, place) {
        (State::Yes, Some(place)) if fact.detail.is_empty() => format!("yes, {place}"),
        (State::No | State::Unknown, Some(place)) if !fact.detail.contains(place) => {
            format!("{}: {place} {}", word(fact.state), fact.detail)
        }
        _ => sentence(fact),
    }
}

fn sentence(fact: &Fact) -> String {
    match (fact.state, fact.detail.as_str()) {
        (state, "") => word(state).to_owned(),
        (State::Yes, detail) => format!("yes, {detail}"),
        (state, detail) => format!("{}: {detail}", word(state)),
    }
}

pub(super) fn word(state: State) -> &'static str {
    match state {
        State::Yes => "yes",
        State::No => "no",
        State::Unknown => "unknown",
    }
}

/// Writes a row for each remark about a source, and at least one row per source.
fn sources<'a>(sources: impl Iterator<Item = &'a Readiness>, columns: usize, out: &mut impl Write) -> io::Result<()> {
    let mut rows = vec![("source".to_owned(), "backend".to_owned(), "what would be better".to_owned())];
    for source in sources {
        let backend = source.backend.as_deref().unwrap_or(match source.state {
            State::Unknown => "unknown",
            State::Yes | State::No => "none",
        });
        let mut remarks: Vec<String> = source
            .better
            .iter()
            .map(|better| format!("{} ({}): {}", better.backend, word(better.state), better.reasons.join("; ")))
            .collect();
        if !source.limitations.is_empty() {
            remarks.push(format!("limitations of {backend}: {}", source.limitations));
        }
        if remarks.is_empty() {
            remarks.push("-".to_owned());
        }
        for (index, remark) in remarks.into_iter().enumerate() {
            let (name, backend) = if index == 0 { (source.name.as_str(), backend) } else { ("", "") };
            rows.push((printable(name), printable(backend), printable(&remark)));
        }
    }
    let first = rows.iter().map(|(name, _, _)| name.chars().count()).max().unwrap_or(0);
    let second = rows.iter().map(|(_, backend, _)| backend.chars().count()).max().unwrap_or(0);
    for (name, backend, remark) in rows {
        write_cell(out, &format!("{}  {}  ", Left(&name, first), Left(&backend, second)), &remark, columns)?;
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use whylate_sources::capabilities::{BetterBackend, Bpf, Privilege};

    use super::*;
    use crate::render::text::screens_of;

    /// Has every kind of answer once.
    pub fn example() -> Capabilities {
        let yes = || Fact::yes("");
        let cpus = |list: &str, count| Some(CpuList { list: list.to_owned(), count: Some(count) });
        let privilege = |name, state, loss: &str| Privilege { name, state, loss: loss.to_owned() };
        Capabilities {
            kernel: Kernel {
                release: Some("6.12.1-\x1b[31mred".to_owned()),
                arch: "x86_64".to_owned(),
                preemption: "PREEMPT_DYNAMIC, full in force".to_owned(),
            },
            btf: Btf { fact: yes(), path: "/sys/kernel/btf/vmlinux", size_bytes: Some(5_216_713) },
            tracefs: Tracefs {
                fact: Fact::no("is mounted, but this user may not read it (run as root)"),
                path: Some("/sys/kernel/tracing".to_owned()),
                tracers: None,
            },
            bpf: Bpf {
                tp_btf: yes(),
                fentry: Fact::no("boot a kernel with CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS=y"),
                raw_tracepoint_programs: yes(),
                syscall_programs: Fact::unknown("not permitted (run as root, or grant CAP_BPF and CAP_PERFMON)"),
                array_maps: yes(),
                ring_buffer_maps: yes(),
                stack_trace_maps: yes(),
                bpf_wq: Fact::no("the kernel has no bpf_wq_init (boot kernel 6.10 or later)"),
                bpf_timer: yes(),
                bpf_local_irq_save: yes(),
                bpf_preempt_disable: yes(),
                task_iterator: yes(),
            },
            privileges: Privileges {
                uid: 1000,
                in_first_user_namespace: Some(true),
                capabilities: vec![
                    privilege("CAP_BPF", State::Yes, "no BPF program loads"),
                    privilege("CAP_PERFMON", State::Yes, "no BPF program may read the kernel"),
                    privilege("CAP_SYSLOG", State::No, "kernel stacks have addresses instead of names"),
                ],
            },
            lockdown: Fact::no("not in force"),
            sysctls: vec![
                Sysctl { name: "kernel.kptr_restrict", value: Some(1), detail: "addresses have names".to_owned() },
                Sysctl { name: "kernel.bpf_stats_enabled", value: None, detail: "it is absent".to_owned() },
            ],
            clock_source: ClockSource {
                current: Some("hpet".to_owned()),
                available: vec!["hpet".to_owned(), "acpi_pm".to_owned()],
            },
            cpus: Cpus {
                online: cpus("0-1", 2),
                possible: cpus("0-3", 4),
                isolated: cpus("", 0),
                nohz_full: None,
                measured: cpus("0-1", 2),
                left_out: None,
            },
            hypervisor: Fact::yes("KVM, QEMU Standard PC"),
            sources: vec![
                Readiness {
                    name: "wq".to_owned(),
                    state: State::Yes,
                    backend: Some("tracepoint".to_owned()),
                    limitations: "requeue races are counted as lost".to_owned(),
                    better: vec![BetterBackend {
                        backend: "fentry".to_owned(),
                        state: State::No,
                        reasons: vec!["function process_one_work is not in BTF".to_owned(), "fentry: boot".to_owned()],
                    }],
                },
                Readiness {
                    name: "offcpu".to_owned(),
                    state: State::Yes,
                    backend: Some("iterator".to_owned()),
                    limitations: String::new(),
                    better: Vec::new(),
                },
            ],
            causes: Readiness {
                name: "--why".to_owned(),
                state: State::Yes,
                backend: Some("no heartbeat".to_owned()),
                limitations: "disabled interrupts cannot be distinguished".to_owned(),
                better: vec![BetterBackend {
                    backend: "occupancy".to_owned(),
                    state: State::No,
                    reasons: vec!["a timer on each CPU: not permitted".to_owned()],
                }],
            },
            injections: vec![Readiness {
                name: "inject work".to_owned(),
                state: State::Unknown,
                backend: None,
                limitations: String::new(),
                better: vec![BetterBackend {
                    backend: "bpf_wq".to_owned(),
                    state: State::Unknown,
                    reasons: vec!["not permitted".to_owned()],
                }],
            }],
        }
    }

    #[test]
    fn people_see_two_columns_and_a_table() {
        insta::assert_snapshot!(screens_of(|mut out, columns| write(&example(), columns, &mut out)));
    }

    #[test]
    fn no_trailing_blanks_or_control_characters() {
        let mut out = Vec::new();
        write(&example(), None, &mut out).expect("memory takes everything");
        let text = String::from_utf8_lossy(&out);
        assert!(
            text.lines().all(|line| line == line.trim_end() && line.chars().all(whylate_model::units::is_printable)),
            "{text}"
        );
    }
}
