// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs the account's BPF programs, compiled by the host's compiler, on a simulated CPU with a known timeline:
//! interrupts come in and threads are preempted, also in the middle of a program. No task may be reported on the CPU
//! while another one ran.

mod libbpf_on_host;

/// Runs threads for 4 us per seed; prints who ran (`had`), and what the account says (`reported`).
const PROGRAM: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#undef NULL
#include "occupancy.bpf.c"

enum { THREADS = 5, WORKERS_HERE = 3, NS = 4000, LATE_NS = 20 };
static struct task_struct tasks[THREADS];
static struct kthread kthreads[THREADS];
static struct worker workers[THREADS];
static struct worker_pool pool;
static struct css_set cgroups;
static struct cgroup cgroup;
static struct kernfs_node node;
static struct rq queue;
static struct cfs_rq fair_queue = { .rq = &queue };
static struct account account;
static struct interval ring[INTERVALS];
static struct task_struct *current;
static u64 now, span_from, random_state;
static int may_be_interrupted, may_be_preempted, is_unannounced;

static u32 drawn(u32 below)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (u32)(random_state >> 33) % below;
}

static void pass(void)
{
    now += 1 + drawn(9);
}

/* Either only a timer's expiry announces the interrupt, or a device's handler does. */
static void interrupt(void)
{
    struct irqaction action = { .name = "eth0" };
    struct hrtimer timer = { .function = (void *)heartbeat_function, .node.expires = now };
    int may = may_be_interrupted;

    may_be_interrupted = 0;
    printf("irq %llu ", now);
    if (is_unannounced) {
        timer.node.expires -= now > LATE_NS && drawn(2) ? LATE_NS : 0;
        on_hrtimer_expire_entry(0, &timer);
        pass();
        on_hrtimer_expire_exit(0);
    } else {
        on_irq_handler_entry(0, 7, &action);
        pass();
        on_irq_handler_exit(0);
    }
    printf("%llu\n", now);
    may_be_interrupted = may;
}

static void switch_to(struct task_struct *next, bool preempt)
{
    int may = may_be_interrupted;

    may_be_interrupted = 0;
    printf("had %d %llu %llu\n", current->pid, span_from, now);
    span_from = now;
    current->nivcsw++;
    on_sched_switch(0, preempt, current, next, 0);
    current = next;
    may_be_interrupted = may;
}

/* Possibly interrupts or preempts the running BPF program or thread. */
static void maybe_interrupt(void)
{
    struct task_struct *preempted = current;

    if (!may_be_interrupted)
        return;
    if (!drawn(4))
        interrupt();
    if (!may_be_preempted || drawn(6))
        return;
    may_be_preempted = 0;
    printf("blind %llu\n", now);
    switch_to(&tasks[WORKERS_HERE + drawn(THREADS - WORKERS_HERE)], true);
    for (u32 left = drawn(4); left; left--) {
        pass();
        if (drawn(2))
            interrupt();
        switch_to(&tasks[1 + drawn(THREADS - 1)], true);
    }
    pass();
    switch_to(preempted, true);
}

void *bpf_map_lookup_elem(void *map, const void *key)
{
    maybe_interrupt();
    if (map == &account_by_cpu)
        return &account;
    return map == &intervals_by_position ? &ring[*(const u32 *)key] : NULL;
}

u64 bpf_ktime_get_ns(void)
{
    u64 read;

    maybe_interrupt();
    read = now;
    maybe_interrupt();
    return read;
}

u32 bpf_get_smp_processor_id(void)
{
    maybe_interrupt();
    return 0;
}

struct task_struct *bpf_get_current_task_btf(void)
{
    maybe_interrupt();
    return current;
}

static void start_or_end_item(bool is_preemptible)
{
    struct worker *worker = &workers[current->pid];
    struct work_struct work = { .func = (void *)(0x1000ul + current->pid) };
    bool begins = !worker->current_func;

    may_be_interrupted = 1;
    may_be_preempted = is_preemptible;
    if (begins) {
        worker->current_func = work.func;
        on_workqueue_execute_start(0, &work);
    } else {
        on_workqueue_execute_end(0, &work);
        worker->current_func = NULL;
    }
    may_be_interrupted = may_be_preempted = 0;
}

static void run(u64 seed, bool is_preemptible)
{
    random_state = seed * 0x9E3779B97F4A7C15ull | 1;
    memset(&account, 0, sizeof(account));
    account.interval_bits = INTERVAL_BITS;
    memset(ring, 0, sizeof(ring));
    for (int pid = 0; pid < THREADS; pid++) {
        tasks[pid] = (struct task_struct){ .pid = pid, .static_prio = 120, .nr_cpus_allowed = 1, .cgroups = &cgroups,
                           .flags = pid && pid < WORKERS_HERE ? PF_WQ_WORKER : 0,
                           .se.cfs_rq = &fair_queue, .worker_private = &kthreads[pid] };
        kthreads[pid].data = &workers[pid];
        workers[pid] = (struct worker){ .pool = &pool };
    }
    cgroup.kn = &node;
    cgroups.dfl_cgrp = &cgroup;
    current = &tasks[0];
    now = span_from = 1;
    printf("run %llu\n", seed);
    switch_to(&tasks[1], false);
    while (now < NS) {
        pass();
        switch (drawn(3)) {
        case 0:
            interrupt();
            break;
        case 1:
            switch_to(&tasks[drawn(THREADS)], drawn(2));
            break;
        default:
            if (!(current->flags & PF_WQ_WORKER))
                continue;
            start_or_end_item(is_preemptible);
        }
        printf("event %llu\n", now);
    }
    pass();
    switch_to(&tasks[0], false);
    for (u32 at = 0; at < account.written; at++) {
        u64 end = at + 1 < account.written ? ring[at + 1].start_ns : account.since_ns;
        u32 late = ring[at].kind == OCCUPANT_VECTOR ? ((struct lateness *)&ring[at].handler)->late_ns : 0;

        printf("reported %d %u %llu %llu %u\n", ring[at].kind, ring[at].id, ring[at].start_ns, end, late);
    }
    printf("lost %llu %llu\n", account.nested, account.astray);
}

/* Sets a read-only setting as user space does before it loads the programs. */
static void set(const volatile void *setting, u64 value, u32 size)
{
    char *page = (char *)((u64)setting & ~4095ull);

    if (mprotect(page, 8192, PROT_READ | PROT_WRITE) && mprotect(page, 4096, PROT_READ | PROT_WRITE))
        exit(3);
    memcpy((void *)setting, &value, size);
}

int main(int count, char **arguments)
{
    is_unannounced = count > 1 && arguments[1][0] == 'u';
    set(&heartbeat_function, 1, sizeof(heartbeat_function));
    set(&late_from_ns, LATE_NS, sizeof(late_from_ns));
    set(&timer_is_unannounced, is_unannounced, sizeof(timer_is_unannounced));
    for (u64 seed = 1; seed <= 100; seed++)
        run(seed, count > 1 && arguments[1][0] == 'p');
    return 0;
}
"#;

/// Upper bound of one run's length in nanoseconds.
const NS: usize = 5_000;

#[derive(Default)]
struct Comparison {
    accounted_ns: u64,
    blind_ns: u64,
    blind_spans: u64,
    /// Interrupts that were late.
    late: u64,
    wrong: Vec<String>,
}

/// Runs the program as `preemptible`, `unannounced` or neither.
fn simulate(how: &str) -> Comparison {
    let output = libbpf_on_host::build(PROGRAM).run(&[how]);
    check(&output)
}

/// Compares what each run printed, nanosecond by nanosecond.
fn check(lines: &str) -> Comparison {
    let mut comparison = Comparison::default();
    for run in lines.split("run ").skip(1) {
        let (mut had, mut irq, mut reported) = (vec![None; NS], vec![false; NS], vec![None; NS]);
        // While a program is preempted, the account is blind until the end of the next event.
        let (mut blind, mut blind_since, mut has_ended) = (vec![false; NS], None, false);
        for line in run.lines().skip(1) {
            let mut words = line.split_whitespace();
            let kind = words.next().unwrap_or_default();
            let numbers: Vec<usize> = words.map(|word| word.parse().expect("a number")).collect();
            match (kind, numbers.as_slice()) {
                ("had", &[pid, from, to]) => had[from..to].fill(Some(pid)),
                ("irq", &[from, to]) => irq[from..to].fill(true),
                ("blind", &[from]) => (blind_since, has_ended) = (blind_since.or(Some(from)), false),
                // The first event is the preempted program's own, the second ends the blind span.
                ("event", &[_]) if blind_since.is_some() && !has_ended => has_ended = true,
                ("event", &[at]) => {
                    comparison.blind_spans += u64::from(has_ended);
                    has_ended = false;
                    blind[blind_since.take().unwrap_or(at)..at].fill(true);
                }
                ("reported", &[kind, id, from, to, late]) => {
                    comparison.late += u64::from(late == 20);
                    assert!([0, 20].contains(&late), "{line}");
                    reported[from..to].fill(Some((kind, id)));
                }
                ("lost", _) => {}
                _ => panic!("{line}"),
            }
        }
        blind[blind_since.unwrap_or(NS)..].fill(true);
        for ns in 1..NS {
            let Some(pid) = had[ns] else { continue };
            comparison.blind_ns += u64::from(blind[ns]);
            let is_right = match reported[ns] {
                // Idle, a thread, or a worker with a work item.
                Some((1, _)) => pid == 0,
                Some((2 | 3, id)) => pid == id,
                Some((5 | 6, _)) => irq[ns],
                Some((0, _)) | None => blind[ns] || pid == 0,
                Some(_) => false,
            };
            comparison.accounted_ns += u64::from(!matches!(reported[ns], None | Some((0, _))));
            if !is_right {
                comparison.wrong.push(format!(
                    "at {ns} {pid} had it, reported {:?}, in run {}",
                    reported[ns],
                    &run[..3]
                ));
            }
        }
    }
    comparison
}

#[test]
fn preempted_programs_attribute_no_time_to_other_threads() {
    for is_preemptible in [false, true] {
        let comparison = simulate(if is_preemptible { "preemptible" } else { "" });
        println!(
            "{} ns reported, {} blind in {} spans",
            comparison.accounted_ns, comparison.blind_ns, comparison.blind_spans
        );
        assert!(
            comparison.wrong.is_empty(),
            "{} ns wrong: {:?}",
            comparison.wrong.len(),
            &comparison.wrong[..5.min(comparison.wrong.len())]
        );
        assert!(comparison.accounted_ns > 300_000, "only {} ns are reported", comparison.accounted_ns);
        assert_eq!(comparison.blind_spans > 100, is_preemptible, "{} programs were preempted", comparison.blind_spans);
    }
}

/// As on Hyper-V: only the timer tracepoints show the timer's interrupt.
#[test]
fn timer_reports_interrupt_without_tracepoint() {
    let comparison = simulate("unannounced");
    println!("{} ns reported, {} late interrupts", comparison.accounted_ns, comparison.late);
    assert!(
        comparison.wrong.is_empty(),
        "{} ns wrong: {:?}",
        comparison.wrong.len(),
        &comparison.wrong[..5.min(comparison.wrong.len())]
    );
    assert!(comparison.late > 1_000, "{} interrupts were late", comparison.late);
}
