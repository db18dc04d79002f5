// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs the account's BPF programs, compiled by the host's compiler, on a simulated CPU with a known context:
//! interrupts with and without tracepoints interrupt threads, softirqs and idle. An interrupted thread must never be
//! reported as waker, submitter, sender or queuer.

mod libbpf_on_host;

/// The simulation; `x86` keeps the preemption count beside the run queue, other architectures keep it in the thread.
const PROGRAM: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#undef NULL
#define HAS_MEMORY
static int is_x86, is_hyper_v, is_rt;
#define bpf_core_field_exists(...) !(is_x86 && strstr(#__VA_ARGS__, "preempt_count"))
#include "occupancy.bpf.c"

enum { THREADS = 4, SLEEPERS = 3, ROUNDS = 20000, SOFTIRQ_BLOCK = 4 };
static struct {
    struct rq queue;
    u32 preempt_count;
} cpu;
static struct task_struct tasks[THREADS], sleepers[SLEEPERS];
static struct css_set cgroups;
static struct cgroup cgroup;
static struct kernfs_node node;
static struct cfs_rq fair_queue = { .rq = &cpu.queue };
static struct account account;
static struct interval ring[INTERVALS];
static struct wakeup wakeups[WAKEUPS];
static struct queued_item items[ITEMS];
static struct disk_request done[INTERVALS >> INTERVALS_A_REQUEST_BITS], in_flight;
static u64 in_flight_key, now = 1, random_state = 0x9E3779B97F4A7C15ull;
static struct task_struct *current = &tasks[1];
static struct gendisk disk;
static struct request_queue requests = { .disk = &disk };

/* The simulated CPU's context. */
static u32 bits;
static int softirq, is_in_interrupt, is_announced;
/* The thread that raised NET_RX since NET_RX ran last, or 0. */
static u32 sender;
static u64 checked[4], wrong;

static u32 drawn(u32 below)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (u32)(random_state >> 33) % below;
}

u64 bpf_ktime_get_ns(void) { return ++now; }
u32 bpf_get_smp_processor_id(void) { return 0; }
struct task_struct *bpf_get_current_task_btf(void) { return current; }

void *bpf_map_lookup_elem(void *map, const void *key)
{
    u32 index = *(const u32 *)key;

    if (map == &account_by_cpu)
        return &account;
    if (map == &intervals_by_position)
        return &ring[index];
    if (map == &wakeup_by_tid)
        return &wakeups[index];
    if (map == &queued_by_work)
        return &items[index];
    if (map == &requests_by_position)
        return &done[index];
    if (map == &requests_by_address)
        return in_flight_key && in_flight_key == *(const u64 *)key ? &in_flight : NULL;
    return NULL;
}

long bpf_map_update_elem(void *map, const void *key, const void *value, u64 flags)
{
    if (map != &requests_by_address)
        return -1;
    in_flight_key = *(const u64 *)key;
    in_flight = *(const struct disk_request *)value;
    return 0;
}

long bpf_map_delete_elem(void *map, const void *key)
{
    in_flight_key = 0;
    return 0;
}

long bpf_probe_read_kernel(void *to, u32 size, const void *from)
{
    if (from != &cpu.preempt_count)
        return -1;
    memcpy(to, from, size);
    return 0;
}

static void set_bits(u32 to)
{
    /* A thread may have softirqs and preemption disabled, which is no interrupt; x86 sets PREEMPT_NEED_RESCHED on top. */
    u32 others = drawn(2) * (2 << 8) + drawn(3) + (drawn(2) ? 0x80000000u : 0);

    bits = to;
    cpu.preempt_count = is_x86 ? to | others : 0xffffffff;
    current->thread_info.preempt_count = is_x86 ? 0xffffffff : (to | others) & 0x7fffffff;
}

enum what { WAKER, QUEUER, SUBMITTER, SENDER };
static const char *const names[] = { "waker", "queuer", "submitter", "sender" };

static void check(enum what what, int is_right, u32 kind, u32 who)
{
    checked[what]++;
    if (is_right || wrong++ > 20)
        return;
    printf("wrong %s: kind %u, number %u; thread %d, softirq %d, in interrupt %d, announced %d\n", names[what], kind, who,
           current->pid, softirq, is_in_interrupt, is_announced);
}

/* Returns whether the reported actor is the one that acts in this context. */
static int is_actor(u32 kind, u32 who)
{
    if (is_in_interrupt && !is_announced) {
        /* An idle CPU does nothing by itself. */
        if (!current->pid && !softirq)
            return kind != ENTRY_THREAD;
        return kind == ENTRY_UNSEEN;
    }
    if (is_in_interrupt)
        return kind != ENTRY_THREAD && kind != ENTRY_UNSEEN;
    if (softirq - 1 == SOFTIRQ_NET_RX && kind == ENTRY_THREAD)
        return sender && who == sender;
    if (softirq || !current->pid)
        return kind != ENTRY_THREAD && kind != ENTRY_UNSEEN;
    return kind == ENTRY_THREAD && who == (u32)current->pid;
}

static void wake(void)
{
    struct task_struct *woken = &sleepers[drawn(SLEEPERS)];
    struct wakeup *wakeup = &wakeups[WORKERS + woken->pid];
    u64 unseen = account.unseen_interrupts;

    woken->nvcsw += 2;
    on_sched_waking(0, woken);
    /* The waker of an IRQ thread is its interrupt; in a softirq that a thread raised, the waker is that thread. */
    if (woken == &sleepers[1] && !(softirq && !is_in_interrupt))
        check(WAKER, wakeup->entry != ENTRY_THREAD && wakeup->entry != ENTRY_UNSEEN, wakeup->entry, wakeup->waker_tid);
    else
        check(WAKER, is_actor(wakeup->entry, wakeup->waker_tid), wakeup->entry, wakeup->waker_tid);
    if (wakeup->entry == ENTRY_UNSEEN && account.unseen_interrupts == unseen)
        check(WAKER, 0, wakeup->entry, 0);
    if (wakeup->entry != ENTRY_THREAD && wakeup->waker_tid)
        check(WAKER, 0, wakeup->entry, wakeup->waker_tid);
}

static void queue(void)
{
    struct work_struct work = {};
    struct queued_item *item = queued_of(&work);
    u32 kind;

    memset(item, 0, sizeof(*item));
    on_workqueue_queue_work(0, 0, 0, &work);
    kind = item->entry.kind & ~ENTRY_OF_ITEM;
    check(QUEUER, is_actor(kind, item->entry.waker), kind, item->entry.waker);
}

static void submit(void)
{
    struct request request = { .q = &requests, .__data_len = 4096 };
    int is_thread = !is_in_interrupt && !softirq;

    on_block_io_start(0, &request);
    check(SUBMITTER, in_flight.submitter == (is_thread ? (u32)current->pid : 0), 0, in_flight.submitter);
    on_block_rq_issue(0, &request);
    if (drawn(2))
        on_block_rq_complete(0, &request, 0, 4096);
    in_flight_key = 0;
}

static void raise(void)
{
    on_softirq_raise(0, SOFTIRQ_NET_RX);
    if (!is_in_interrupt && !softirq && current->pid)
        sender = current->pid;
    check(SENDER, account.net_raisers[SOFTIRQ_NET_RX & 1] == sender, 0, account.net_raisers[SOFTIRQ_NET_RX & 1]);
}

static void act(void)
{
    for (u32 left = drawn(3); left; left--) {
        switch (drawn(6)) {
        case 0:
            queue();
            break;
        case 1:
            submit();
            break;
        case 2:
            raise();
            break;
        default:
            wake();
        }
    }
}

/* Expires a timer, with or without a tracepoint of its interrupt. */
static void expire_timer(void)
{
    struct hrtimer timer = { .function = (void *)2, .node.expires = now };
    struct wakeup *wakeup = &wakeups[WORKERS + sleepers[0].pid];

    on_hrtimer_expire_entry(0, &timer);
    sleepers[0].nvcsw += 2;
    on_sched_waking(0, &sleepers[0]);
    if (is_announced || is_hyper_v)
        check(WAKER, wakeup->entry == ENTRY_TIMER, wakeup->entry, wakeup->waker_tid);
    else
        check(WAKER, wakeup->entry != ENTRY_THREAD, wakeup->entry, wakeup->waker_tid);
    if (is_hyper_v)
        on_hrtimer_expire_exit(0);
}

static void interrupt(void)
{
    struct irqaction action = { .name = "eth0" };
    u32 below = bits;
    int is_timer = !drawn(3);

    is_in_interrupt = 1;
    is_announced = drawn(2) && !(is_hyper_v && is_timer);
    set_bits(below | (1 << 16));
    if (is_announced && is_timer)
        on_irq_vector_entry(0, 0xec);
    else if (is_announced)
        on_irq_handler_entry(0, 7, &action);
    if (is_timer)
        expire_timer();
    act();
    if (is_announced && is_timer)
        on_irq_vector_exit(0);
    else if (is_announced)
        on_irq_handler_exit(0);
    is_in_interrupt = is_announced = 0;
    set_bits(below);
}

static void serve_softirq(void)
{
    static const int numbers[] = { SOFTIRQ_TIMER, SOFTIRQ_NET_RX, SOFTIRQ_BLOCK, SOFTIRQ_RCU };
    u32 number = numbers[drawn(4)];

    /* With PREEMPT_RT a thread serves the softirq, and the count is elsewhere. */
    set_bits(is_rt ? 0 : SERVES_SOFTIRQ);
    on_softirq_entry(0, number);
    softirq = number + 1;
    act();
    if (drawn(2))
        interrupt();
    act();
    softirq = 0;
    on_softirq_exit(0, number);
    if (number == SOFTIRQ_NET_RX)
        sender = 0;
    set_bits(0);
}

/* Loopback packets sent by a known timer wake for that timer; packets from elsewhere wake for the network. */
static void deliver_for_timer(void)
{
    struct timer_list known = { .function = (void *)7 }, other = { .function = (void *)8 };
    struct wakeup *wakeup = &wakeups[WORKERS + sleepers[0].pid];

    for (u32 i = 0; i < 3; i++) {
        set_bits(SERVES_SOFTIRQ);
        on_softirq_entry(0, SOFTIRQ_TIMER);
        on_timer_expire_entry(0, i == 1 ? &other : &known);
        sleepers[0].nvcsw += 2;
        on_sched_waking(0, &sleepers[0]);
        check(WAKER, wakeup->entry == ENTRY_TIMER && wakeup->timer == (i == 1 ? 0 : 2), wakeup->entry, wakeup->timer);
        if (i < 2)
            on_softirq_raise(0, SOFTIRQ_NET_RX);
        on_softirq_exit(0, SOFTIRQ_TIMER);
        on_softirq_entry(0, SOFTIRQ_NET_RX);
        sleepers[0].nvcsw += 2;
        on_sched_waking(0, &sleepers[0]);
        check(WAKER, wakeup->entry == (i ? ENTRY_NETWORK : ENTRY_TIMER), wakeup->entry, wakeup->timer);
        check(WAKER, i || wakeup->timer == 2, wakeup->entry, wakeup->timer);
        on_softirq_exit(0, SOFTIRQ_NET_RX);
        set_bits(0);
    }
}

/* A thread calls execve, and takes over the TID of its thread-group leader. */
static void take_leader_tid_over(bool is_switched)
{
    struct task_struct *task = &tasks[2], *before = current;
    u32 written;

    task->pid = 50;
    current = task;
    on_sched_switch(0, true, before, task, 0);
    task->pid = task->tgid;
    written = account.written;
    if (is_switched)
        on_sched_switch(0, true, task, &tasks[1], 0);
    else
        on_sched_process_exec(0, task);
    check(WAKER, ring[written].id == 50 && ring[written].kind == OCCUPANT_THREAD, ring[written].kind, ring[written].id);
    check(WAKER, ring[written].left == LEFT_DEAD && account.astray == 0, ring[written].left, account.astray);
    written++;
    check(WAKER, ring[written].id == 2 && ring[written].start_ns == ring[written].entry.woken_ns, 0, ring[written].id);
    check(WAKER, ring[written].entry.kind == ENTRY_PARENT_OF_THREAD && ring[written].entry.waker == 50, ring[written].entry.kind,
          ring[written].entry.waker);
    if (!is_switched)
        on_sched_switch(0, true, task, &tasks[1], 0);
    current = &tasks[1];
}

static void set(const volatile void *setting, u64 value, u32 size)
{
    char *page = (char *)((u64)setting & ~4095ull);

    if (mprotect(page, 8192, PROT_READ | PROT_WRITE) && mprotect(page, 4096, PROT_READ | PROT_WRITE))
        exit(3);
    memcpy((void *)setting, &value, size);
}

static void make(struct task_struct *task, int pid, u32 flags, const char *name)
{
    *task = (struct task_struct){ .pid = pid, .tgid = pid, .prio = 120, .static_prio = 120, .cgroups = &cgroups,
                                  .flags = flags, .se.cfs_rq = &fair_queue };
    strcpy(task->comm, name);
}

int main(int count, char **arguments)
{
    is_x86 = !strcmp(arguments[1], "x86");
    is_rt = !strcmp(arguments[2], "rt");
    is_hyper_v = !strcmp(arguments[2], "hyper-v");
    set(&keeps_all_wakeups, 1, sizeof(keeps_all_wakeups));
    set(&timer_is_unannounced, is_hyper_v, sizeof(timer_is_unannounced));
    set(&preempt_count_distance, is_x86 ? (char *)&cpu.preempt_count - (char *)&cpu.queue : 0, sizeof(preempt_count_distance));
    cgroup.kn = &node;
    cgroups.dfl_cgrp = &cgroup;
    account.interval_bits = INTERVAL_BITS;
    for (int pid = 0; pid < THREADS; pid++)
        make(&tasks[pid], pid, 0, "thread");
    make(&sleepers[0], 100, 0, "sleeper");
    make(&sleepers[1], 101, PF_KTHREAD, "irq/7-eth0");
    make(&sleepers[2], 102, PF_KTHREAD, "kthread");
    set(&known_timers[1], 7, sizeof(known_timers[1]));
    set_bits(0);
    on_sched_switch(0, true, &tasks[0], current, 0);
    take_leader_tid_over(false);
    take_leader_tid_over(true);
    deliver_for_timer();
    for (int round = 0; round < ROUNDS; round++) {
        struct task_struct *next = &tasks[drawn(THREADS)], *before = current;

        switch (drawn(4)) {
        case 0:
            interrupt();
            break;
        case 1:
            serve_softirq();
            break;
        case 2:
            before->nivcsw++;
            current = next;
            on_sched_switch(0, true, before, next, 0);
            set_bits(0);
            break;
        default:
            act();
        }
    }
    printf("checked %llu %llu %llu %llu, unseen %llu, wrong %llu\n", checked[0], checked[1], checked[2], checked[3],
           account.unseen_interrupts, wrong);
    return wrong != 0;
}
"#;

#[test]
fn interrupted_thread_is_never_reported_as_actor() {
    let program = libbpf_on_host::build(PROGRAM);
    for place in ["x86", "thread"] {
        for machine in ["other", "rt", "hyper-v"] {
            let output = program.run(&[place, machine]);
            println!("{place}, {machine}: {output}");
            let counts: Vec<u64> = output
                .split(|character: char| !character.is_ascii_digit())
                .filter_map(|word| word.parse().ok())
                .collect();
            let [wakers, queuers, submitters, senders, unseen, wrong] = counts[..] else { panic!("{output}") };
            assert_eq!(wrong, 0, "{output}");
            assert!(wakers.min(queuers).min(submitters).min(senders).min(unseen) > 1_000, "{output}");
        }
    }
}
