/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Ends an interval of a CPU's account and begins the next one, with the thread that has the CPU. */
#pragma once

#include "occupancy.bpf.h"
#include "registers.bpf.h"
#include "steal.bpf.h"

/* How far each CPU's `steal_time` lies from its `runqueues`; 0 where the kernel has none. */
const volatile s64 steal_time_distance = 0;

/* `steal_ns` is the steal clock's reading, 0 where it was not read; `left` how the thread leaves the CPU, if it does. */
static __always_inline void end_interval(struct account *account, u32 cpu, u64 now_ns, u64 steal_ns, u16 left)
{
	struct interval *interval;

	/* Where a clock stands still, or was read earlier: none is empty, as those who read them go by when they begin. */
	if (now_ns <= account->since_ns)
		now_ns = account->since_ns + (left || account->entry.kind);
	if (account->since_ns && now_ns > account->since_ns) {
		interval = interval_at(account, cpu, account->written);
		if (interval) {
			describe(interval, account);
			interval->steal_ns = since(steal_ns, account->steal_seen_ns);
			interval->left = left;
			/* User space may read it from now on. */
			store_in_order(&account->written, account->written + 1);
		}
	}
	if (account->entry.kind)
		__builtin_memset(&account->entry, 0, sizeof(account->entry));
	account->nmi_seen_ns = account->nmi_ns;
	if (steal_ns > account->steal_seen_ns)
		account->steal_seen_ns = steal_ns;
	account->since_ns = now_ns;
}

/* The CPU's own pool for which a worker's item counts as in progress. */
static __always_inline u8 pool_of_worker(const struct task_struct *task)
{
	struct worker *worker;

	/* A worker that may run elsewhere belongs to no CPU's own pool. */
	if (task->nr_cpus_allowed != 1)
		return 0;
	worker = worker_of(task);
	/* Unbound workers may have one CPU left to run on; and no pool waits for a rescuer's items. */
	if (BPF_CORE_READ(worker, pool, cpu) < 0 || BPF_CORE_READ(worker, rescue_wq))
		return 0;
	/* A worker's nice value is its pool's, and a kernel thread's priority is 120 + nice. */
	return task->static_prio < 120 ? BUSY_HIGHPRI : BUSY_NORMAL;
}

static __always_inline void enter_worker(struct account *account, const struct task_struct *task)
{
	if (account->preempted_normal == account->tid)
		account->preempted_normal = 0;
	if (account->preempted_highpri == account->tid)
		account->preempted_highpri = 0;
	account->handler = handler_of_worker(task);
	if (account->handler)
		account->own_pool = pool_of_worker(task);
}

/* In words: half as long as a call of bpf_probe_read_kernel(). */
static __always_inline void read_name(char *name, const struct task_struct *task)
{
	const u64 *from = (const u64 *)task->comm;
	u64 *to = (u64 *)name;

	to[0] = from[0];
	to[1] = from[1];
}

static __always_inline void enter_number(struct account *account, const struct task_struct *task)
{
	account->tid = task->pid;
	if (own_namespace)
		account->shown_tid = shown_number(task);
}

/* The thread that has the CPU from now on. */
static __always_inline void enter_thread(struct account *account, const struct task_struct *task)
{
	account->own_pool = 0;
	account->handler = 0;
	account->task = (u64)task;
	enter_number(account, task);
	account->kind = task->pid ? OCCUPANT_THREAD : OCCUPANT_IDLE;
	account->cgroup = cgroup_number_of(task);
	read_name(account->name, task);
	if (task->flags & PF_WQ_WORKER)
		enter_worker(account, task);
}

/* Where a switch was not seen (some kernels hide those away from a supervisor's threads), another thread has the CPU now. */
static __always_inline bool is_astray(const struct account *account, const struct task_struct *task)
{
	return account->since_ns && account->tid != (u32)task->pid;
}

/* How the current thread came by its CPU at a switch that was not seen. */
int tell_entry_of_current(struct account *account, u32 cpu);

/*
 * When a thread took the CPU whose switch_in was not seen: by the scheduler's clock, which has just been read at a switch_out,
 * and else is as far behind CLOCK_MONOTONIC as it was at the last switch. That was at least 1 ns ago.
 */
static __always_inline u64 unseen_switch_in_ns(const struct account *account, struct task_struct *task, u64 now_ns, bool is_leaving)
{
	u64 at_ns = now_ns - 1;

	if (is_leaving)
		at_ns -= task_ran_ns(task);
	else if (account->clock_behind_ns && bpf_core_field_exists(task->sched_info.last_arrival) && task->sched_info.last_arrival)
		at_ns = task->sched_info.last_arrival + account->clock_behind_ns;
	if (at_ns >= now_ns)
		at_ns = now_ns - 1;
	return at_ns > account->since_ns ? at_ns : account->since_ns;
}

/* Nobody knows who had the CPU until a thread took it whose switch_in was not seen. */
static __always_inline void end_unseen(struct account *account, u32 cpu, u64 switch_in_ns)
{
	account->kind = OCCUPANT_NOBODY;
	account->handler = 0;
	account->own_pool = 0;
	account->astray++;
	end_interval(account, cpu, switch_in_ns, 0, 0);
}

/*
 * The current thread has the CPU, and stays. Global, so that the verifier checks it once: each pointer that is read from a
 * thread makes it search all types of the kernel by name.
 */
__noinline int find_current(struct account *account, u32 cpu, u64 now_ns)
{
	struct task_struct *task = bpf_get_current_task_btf();

	if (!account)
		return 0;
	/* What is on top of it has begun since. */
	if (account->in_irq || account->softirq) {
		account->astray++;
		enter_thread(account, task);
		return 0;
	}
	end_unseen(account, cpu, unseen_switch_in_ns(account, task, now_ns, false));
	enter_thread(account, task);
	return tell_entry_of_current(account, cpu);
}

/*
 * A thread that executes a program while it is not its process's first one takes over the number of that (de_thread() in
 * fs/exec.c): the number that it had ends, and the other one begins as that of a thread which it has made.
 */
static __always_inline bool has_other_number(const struct account *account, const struct task_struct *task)
{
	return is_astray(account, task) && account->task == (u64)task && task->pid == task->tgid && !account->in_irq && !account->softirq;
}

/* From now on the current thread has its other number. Global for the same reason. */
__noinline int take_number(struct account *account, u32 cpu, u64 now_ns)
{
	u32 former;

	if (!account)
		return 0;
	former = own_namespace ? account->shown_tid : account->tid;
	end_interval(account, cpu, now_ns, 0, LEFT_DEAD);
	enter_number(account, bpf_get_current_task_btf());
	account->entry.woken_ns = account->since_ns;
	account->entry.waker = former;
	account->entry.waker_cpu = cpu;
	account->entry.kind = ENTRY_PARENT_OF_THREAD;
	return 0;
}

/* Ends the present interval of a CPU whose thread stays. */
static __always_inline void end_interval_of_thread(struct account *account, u32 cpu)
{
	struct task_struct *task = bpf_get_current_task_btf();
	bool astray, is_on_top = account->in_irq || account->softirq;
	u64 now_ns = bpf_ktime_get_ns();

	if (__builtin_expect(has_other_number(account, task), 0))
		take_number(account, cpu, now_ns - 1);
	astray = is_astray(account, task);
	if (astray && !is_on_top)
		find_current(account, cpu, now_ns);
	if (!account->steal_clock && steal_time_distance && bpf_core_field_exists(task->se.cfs_rq))
		account->steal_clock = (u64)BPF_CORE_READ(task, se.cfs_rq, rq) + steal_time_distance;
	/* Without an exact clock, what was stolen is told at the next switch. */
	end_interval(account, cpu, now_ns, exact_steal_ns(account->steal_clock), 0);
	if (astray && is_on_top)
		find_current(account, cpu, now_ns);
}

enum {
	/* How many intervals a program may have written since it was preempted, at most. */
	WRITTEN_AFTERWARDS = 4,
};

/* The number of no thread. */
#define NO_THREAD (~0u)

/*
 * A program that was preempted at its work has kept others from writing since then, and has gone on with what it had
 * read before. Nobody knows who had the CPU since it was handed over the first time. Global for the same reason.
 */
__noinline int catch_up(struct account *account, u32 cpu)
{
	struct interval *first = NULL;
	u64 missed_ns;
	u32 position;

	if (!account)
		return 0;
	missed_ns = account->missed_ns;
	position = account->written;
	account->missed_switch = false;
	/* What comes now may be missed again. */
	barrier();
	account->in_irq = false;
	account->in_timer = false;
	account->softirq = 0;
	if (account->since_ns <= missed_ns)
		end_interval(account, cpu, missed_ns, 0, 0);
	/* They stay where they are: somebody may have read them. */
	for (u32 left = WRITTEN_AFTERWARDS; left && position; left--) {
		struct interval *last = interval_at(account, cpu, --position);

		if (!last || last->start_ns <= missed_ns)
			break;
		last->kind = OCCUPANT_NOBODY;
		first = last;
	}
	if (first)
		first->start_ns = missed_ns;
	else
		account->since_ns = missed_ns;
	account->tid = NO_THREAD;
	account->task = 0;
	end_interval_of_thread(account, cpu);
	return 0;
}

static __always_inline bool open(struct account *account, u32 cpu)
{
	if (account->is_busy) {
		account->nested++;
		return false;
	}
	account->is_busy = true;
	barrier();
	if (__builtin_expect(account->missed_switch, 0))
		catch_up(account, cpu);
	return true;
}

/* The account of this CPU, for one program at a time; NULL for a program that interrupts another one. */
static __always_inline struct account *open_account(u32 cpu)
{
	struct account *account = account_of(cpu);

	return account && open(account, cpu) ? account : NULL;
}

static __always_inline void close_account(struct account *account)
{
	barrier();
	account->is_busy = false;
}

/* A switch while a program is at work: that program was preempted. */
static __always_inline void miss_switch(struct account *account, u64 now_ns)
{
	if (account->missed_switch)
		return;
	account->missed_ns = now_ns;
	account->missed_switch = true;
}

/* A worker with an item that was preempted keeps its pool from starting another worker. */
static __always_inline void leave_worker(struct account *account, bool was_preempted)
{
	if (!was_preempted)
		return;
	if (account->own_pool == BUSY_NORMAL)
		account->preempted_normal = account->tid;
	if (account->own_pool == BUSY_HIGHPRI)
		account->preempted_highpri = account->tid;
}
