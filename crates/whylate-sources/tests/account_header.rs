// SPDX-License-Identifier: MIT OR Apache-2.0
//! The programs of the account, compiled by the host's compiler, on a CPU whose every nanosecond is known: interrupts come
//! in, and threads are preempted, also in the middle of a program. Nobody is told to have had a CPU that another had.

mod libbpf_on_host;

/// Runs threads for some microseconds and prints what they had (`had`), and what the account says (`told`).
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

/* Without an event of its own, or as a device's. */
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

static void hand_to(struct task_struct *next, bool preempt)
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

/* A program is at work, or the thread itself. */
static void something_happens(void)
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
    hand_to(&tasks[WORKERS_HERE + drawn(THREADS - WORKERS_HERE)], true);
    for (u32 left = drawn(4); left; left--) {
        pass();
        if (drawn(2))
            interrupt();
        hand_to(&tasks[1 + drawn(THREADS - 1)], true);
    }
    pass();
    hand_to(preempted, true);
}

void *bpf_map_lookup_elem(void *map, const void *key)
{
    something_happens();
    if (map == &account_by_cpu)
        return &account;
    return map == &intervals_by_position ? &ring[*(const u32 *)key] : NULL;
}

u64 bpf_ktime_get_ns(void)
{
    u64 read;

    something_happens();
    read = now;
    something_happens();
    return read;
}

u32 bpf_get_smp_processor_id(void)
{
    something_happens();
    return 0;
}

struct task_struct *bpf_get_current_task_btf(void)
{
    something_happens();
    return current;
}

static void item_changes_here(bool is_preemptible)
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
    hand_to(&tasks[1], false);
    while (now < NS) {
        pass();
        switch (drawn(3)) {
        case 0:
            interrupt();
            break;
        case 1:
            hand_to(&tasks[drawn(THREADS)], drawn(2));
            break;
        default:
            if (!(current->flags & PF_WQ_WORKER))
                continue;
            item_changes_here(is_preemptible);
        }
        printf("event %llu\n", now);
    }
    pass();
    hand_to(&tasks[0], false);
    for (u32 at = 0; at < account.written; at++) {
        u64 end = at + 1 < account.written ? ring[at + 1].start_ns : account.since_ns;
        u32 late = ring[at].kind == OCCUPANT_VECTOR ? ((struct lateness *)&ring[at].handler)->late_ns : 0;

        printf("told %d %u %llu %llu %u\n", ring[at].kind, ring[at].id, ring[at].start_ns, end, late);
    }
    printf("lost %llu %llu\n", account.nested, account.astray);
}

/* What user space sets before it loads the programs. */
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

/// Each run is shorter, in nanoseconds.
const NS: usize = 5_000;

#[derive(Default)]
struct Found {
    told_ns: u64,
    blind_ns: u64,
    blind_spans: u64,
    /// Interrupts that were late.
    late: u64,
    wrong: Vec<String>,
}

/// `preemptible`, `unannounced` or neither.
fn simulate(how: &str) -> Found {
    let output = libbpf_on_host::build(PROGRAM).run(&[how]);
    check(&output)
}

/// Goes through what was printed, run by run.
fn check(lines: &str) -> Found {
    let mut found = Found::default();
    for run in lines.split("run ").skip(1) {
        let (mut had, mut irq, mut told) = (vec![None; NS], vec![false; NS], vec![None; NS]);
        // What happens while a program is preempted is seen again from the end of the next event on.
        let (mut blind, mut blind_since, mut has_ended) = (vec![false; NS], None, false);
        for line in run.lines().skip(1) {
            let mut words = line.split_whitespace();
            let kind = words.next().unwrap_or_default();
            let numbers: Vec<usize> = words.map(|word| word.parse().expect("a number")).collect();
            match (kind, numbers.as_slice()) {
                ("had", &[pid, from, to]) => had[from..to].fill(Some(pid)),
                ("irq", &[from, to]) => irq[from..to].fill(true),
                ("blind", &[from]) => (blind_since, has_ended) = (blind_since.or(Some(from)), false),
                // The program that was preempted, and the event after it.
                ("event", &[_]) if blind_since.is_some() && !has_ended => has_ended = true,
                ("event", &[at]) => {
                    found.blind_spans += u64::from(has_ended);
                    has_ended = false;
                    blind[blind_since.take().unwrap_or(at)..at].fill(true);
                }
                ("told", &[kind, id, from, to, late]) => {
                    found.late += u64::from(late == 20);
                    assert!([0, 20].contains(&late), "{line}");
                    told[from..to].fill(Some((kind, id)));
                }
                ("lost", _) => {}
                _ => panic!("{line}"),
            }
        }
        blind[blind_since.unwrap_or(NS)..].fill(true);
        for ns in 1..NS {
            let Some(pid) = had[ns] else { continue };
            found.blind_ns += u64::from(blind[ns]);
            let is_right = match told[ns] {
                // Idle, a thread, or one with an item.
                Some((1, _)) => pid == 0,
                Some((2 | 3, id)) => pid == id,
                Some((5 | 6, _)) => irq[ns],
                Some((0, _)) | None => blind[ns] || pid == 0,
                Some(_) => false,
            };
            found.told_ns += u64::from(!matches!(told[ns], None | Some((0, _))));
            if !is_right {
                found.wrong.push(format!("at {ns} {pid} had it, told {:?}, in run {}", told[ns], &run[..3]));
            }
        }
    }
    found
}

#[test]
fn nobody_has_what_others_had_while_a_program_was_preempted() {
    for is_preemptible in [false, true] {
        let found = simulate(if is_preemptible { "preemptible" } else { "" });
        println!("{} ns told, {} blind in {} spans", found.told_ns, found.blind_ns, found.blind_spans);
        assert!(
            found.wrong.is_empty(),
            "{} ns wrong: {:?}",
            found.wrong.len(),
            &found.wrong[..5.min(found.wrong.len())]
        );
        assert!(found.told_ns > 300_000, "only {} ns are told", found.told_ns);
        assert_eq!(found.blind_spans > 100, is_preemptible, "{} programs were preempted", found.blind_spans);
    }
}

/// As on Hyper-V: nothing but the functions of timers tells of their interrupt.
#[test]
fn an_interrupt_without_an_event_is_told_by_its_timer() {
    let found = simulate("unannounced");
    println!("{} ns told, {} late interrupts", found.told_ns, found.late);
    assert!(found.wrong.is_empty(), "{} ns wrong: {:?}", found.wrong.len(), &found.wrong[..5.min(found.wrong.len())]);
    assert!(found.late > 1_000, "{} interrupts were late", found.late);
}
