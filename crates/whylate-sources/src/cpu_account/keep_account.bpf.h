/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Ends an interval of a CPU's account and starts the next one with the current thread. */
#pragma once

#include "occupancy.bpf.h"
#include "registers.bpf.h"
#include "steal.bpf.h"

/* Distance of a CPU's `steal_time` from its `runqueues`; 0 where the kernel has none. */
const volatile s64 steal_time_distance = 0;

/* `steal_ns` is the steal clock's reading, 0 if not read; `left` is how the thread leaves the CPU, 0 if it does not. */
static __always_inline void end_interval(struct account *account, u32 cpu, u64 now_ns, u64 steal_ns, u16 left)
{
	struct interval *interval;

	/* If the clock stands still, or was read earlier, give the interval 1 ns: readers identify intervals by their start. */
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

/* Returns the per-CPU pool in which a worker's item counts as in progress. */
static __always_inline u8 pool_of_worker(const struct task_struct *task)
{
	struct worker *worker;

	/* A worker that may run on several CPUs belongs to no per-CPU pool. */
	if (task->nr_cpus_allowed != 1)
		return 0;
	worker = worker_of(task);
	/* An unbound worker may have only one CPU left, and no pool waits for a rescuer's items. */
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

/* Copies 8 bytes at a time: twice as fast as bpf_probe_read_kernel(). */
static __always_inline void read_name(char *name, const struct task_struct *task)
{
	const u64 *from = (const u64 *)task->comm;
	u64 *to = (u64 *)name;

	to[0] = from[0];
	to[1] = from[1];
}

static __always_inline void set_tid(struct account *account, const struct task_struct *task)
{
	account->tid = task->pid;
	if (own_namespace)
		account->shown_tid = shown_number(task);
}

/* Makes the thread the occupant from now on; `cgroup` is the number of its cgroup. */
static __always_inline void enter_thread(struct account *account, const struct task_struct *task, u64 cgroup)
{
	account->own_pool = 0;
	account->handler = 0;
	account->task = (u64)task;
	set_tid(account, task);
	account->kind = task->pid ? OCCUPANT_THREAD : OCCUPANT_IDLE;
	account->cgroup = cgroup;
	read_name(account->name, task);
	if (task->flags & PF_WQ_WORKER)
		enter_worker(account, task);
}

/* Tests for an unseen switch: another thread runs now. Some kernels hide switches away from a supervisor's threads. */
static __always_inline bool is_astray(const struct account *account, const struct task_struct *task)
{
	return account->since_ns && account->tid != (u32)task->pid;
}

/* Records how the current thread was switched in when that switch was not seen. */
int fill_entry_of_current(struct account *account, u32 cpu);

/*
 * Returns when a thread without a recorded switch-in took the CPU, at least 1 ns ago: from the scheduler's clock, read just now if the
 * thread is leaving; otherwise that clock lags CLOCK_MONOTONIC as it did at the last switch.
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

/* Marks the time until an unseen switch-in as having an unknown occupant. */
static __always_inline void end_unseen(struct account *account, u32 cpu, u64 switch_in_ns)
{
	account->kind = OCCUPANT_NOBODY;
	account->handler = 0;
	account->own_pool = 0;
	account->astray++;
	end_interval(account, cpu, switch_in_ns, 0, 0);
}

/*
 * Makes the current thread, which keeps running, the occupant after an unseen switch. Global, so that the verifier checks it once: each
 * pointer read from a thread makes it search all types of the kernel by name.
 */
__noinline int find_current(struct account *account, u32 cpu, u64 now_ns)
{
	struct task_struct *task = bpf_get_current_task_btf();
	u64 cgroup;

	if (!account)
		return 0;
	cgroup = cgroup_number_of(untrusted(struct task_struct, task));
	/* The interrupt or softirq above the thread started after the unseen switch. */
	if (account->in_irq || account->softirq) {
		account->astray++;
		enter_thread(account, task, cgroup);
		return 0;
	}
	end_unseen(account, cpu, unseen_switch_in_ns(account, task, now_ns, false));
	enter_thread(account, task, cgroup);
	return fill_entry_of_current(account, cpu);
}

/*
 * Tests whether the current thread changed its TID: one that calls execve() without being the group leader takes over the leader's TID
 * (de_thread() in fs/exec.c). Its former TID ends, and the new one starts as a thread created by the former.
 */
static __always_inline bool has_new_tid(const struct account *account, const struct task_struct *task)
{
	return is_astray(account, task) && account->task == (u64)task && task->pid == task->tgid && !account->in_irq && !account->softirq;
}

/* Starts an interval with the current thread's new TID. Global for the same reason. */
__noinline int change_tid(struct account *account, u32 cpu, u64 now_ns)
{
	u32 former;

	if (!account)
		return 0;
	former = own_namespace ? account->shown_tid : account->tid;
	end_interval(account, cpu, now_ns, 0, LEFT_DEAD);
	set_tid(account, bpf_get_current_task_btf());
	account->entry.woken_ns = account->since_ns;
	account->entry.waker = former;
	account->entry.waker_cpu = cpu;
	account->entry.kind = ENTRY_PARENT_OF_THREAD;
	return 0;
}

/* Ends the current interval of a CPU that keeps its thread. */
static __always_inline void end_interval_of_thread(struct account *account, u32 cpu)
{
	struct task_struct *task = bpf_get_current_task_btf();
	bool astray, is_on_top = account->in_irq || account->softirq;
	u64 now_ns = bpf_ktime_get_ns();

	if (__builtin_expect(has_new_tid(account, task), 0))
		change_tid(account, cpu, now_ns - 1);
	astray = is_astray(account, task);
	if (astray && !is_on_top)
		find_current(account, cpu, now_ns);
	if (!account->steal_clock && steal_time_distance && bpf_core_field_exists(task->se.cfs_rq))
		account->steal_clock = (u64)BPF_CORE_READ(task, se.cfs_rq, rq) + steal_time_distance;
	/* Without an exact steal clock, steal time is accounted at the next switch. */
	end_interval(account, cpu, now_ns, exact_steal_ns(account->steal_clock), 0);
	if (astray && is_on_top)
		find_current(account, cpu, now_ns);
}

enum {
	/* Maximum number of intervals that a program may have written since it was preempted. */
	WRITTEN_AFTERWARDS = 4,
};

/* TID of no thread. */
#define NO_THREAD (~0u)

/*
 * A program that was preempted while it updated the account has blocked updates since, and has continued with stale values. The occupant is
 * unknown since the first missed switch. Global for the same reason.
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
	/* A switch from here on may be missed again. */
	barrier();
	account->in_irq = false;
	account->in_timer = false;
	account->softirq = 0;
	if (account->since_ns <= missed_ns)
		end_interval(account, cpu, missed_ns, 0, 0);
	/* The intervals keep their positions: a reader may have seen them. */
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

/* Locks this CPU's account for one program; NULL for a program that interrupts another one. */
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

/* Notes a switch during another program's update: that program was preempted. */
static __always_inline void miss_switch(struct account *account, u64 now_ns)
{
	if (account->missed_switch)
		return;
	account->missed_ns = now_ns;
	account->missed_switch = true;
}

/* A preempted worker with an item keeps its pool from starting another worker. */
static __always_inline void leave_worker(struct account *account, bool was_preempted)
{
	if (!was_preempted)
		return;
	if (account->own_pool == BUSY_NORMAL)
		account->preempted_normal = account->tid;
	if (account->own_pool == BUSY_HIGHPRI)
		account->preempted_highpri = account->tid;
}
