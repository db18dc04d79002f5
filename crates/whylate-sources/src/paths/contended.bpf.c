// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Kernel locks for which threads wait, with the owner at the beginning (5.19). Without contention no program runs. Spinlocks are not
 * recorded: they name no owner, and the thread is on its CPU. Nor are semaphores and percpu rwsems, which name no owner either.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>
#include "compat.bpf.h"
#include "registers.bpf.h"
#include "pid_namespace.bpf.h"
#include "lock_owner.bpf.h"
#include "lock_of.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Flags of contention_begin (include/trace/events/lock.h). */
enum {
	LCB_F_SPIN = 1 << 0,
	LCB_F_READ = 1 << 1,
	LCB_F_WRITE = 1 << 2,
	LCB_F_RT = 1 << 3,
	LCB_F_PERCPU = 1 << 4,
	LCB_F_MUTEX = 1 << 5,
};

enum contended_limits {
	/* Threads that wait at a time; on a hash collision the later one is kept. */
	CONTENDING_THREADS = 1 << 13,
	PATH_NAMES = 10,
	NAME_BYTES = 72,
	/* Hard links of an inode that are looked at. */
	ALIASES = 8,
	CHECKED_WORDS = 7,
};

/* Wait of a thread for a lock since its latest contention_begin: a mutex has several, as the lock passes from owner to owner. */
struct contending {
	union {
		struct {
			/* The struct task_struct of the thread; 0: it does not wait. */
			u64 task;
			u64 lock;
			u64 since_ns;
			/* TID of the owner, in whylate's PID namespace; 0: unknown. */
			u32 holder;
			/* enum lock_kind */
			u16 kind;
			/* It runs, and spins. */
			u8 is_spinning;
			/* It waits for an rwsem as a reader. */
			u8 is_reader;
			char holder_name[16];
			/* TID of the last reader that took the rwsem for which it waits as a writer; 0: unknown. */
			u32 reader;
			u32 _unused;
		};
		u64 words[CHECKED_WORDS];
	};
	/* Of the words: two threads may have written them at once. */
	u64 check;
};
_Static_assert(sizeof(struct contending) == 8 * (CHECKED_WORDS + 1), "the check does not cover all");

/* A part of a contended acquisition, with one owner at its beginning. */
struct contended_wait {
	u64 from_ns;
	u64 to_ns;
	u64 lock;
	u64 inode;
	u32 tid;
	/* enum lock_kind */
	u16 kind;
	/* enum lock_of */
	u8 lock_of;
	/* The waker may be another thread than one that held the lock. */
	u8 is_waker_uncertain;
	u32 holder;
	/* PID of the process of a memory map; 0: the thread's own. */
	u32 memory_of;
	/* Of the file system: major << 20 | minor. */
	u32 device;
	/* Number of `names`. */
	u16 count;
	u8 is_deleted;
	/* `names` begin at the root of the file system. */
	u8 is_whole;
	/* TID of the last reader that had taken the rwsem when a writer began to wait; 0: unknown. */
	u32 reader;
	/* The thread has the lock at the end. */
	u8 is_taken;
	u8 _unused[3];
	char holder_name[16];
	char memory_name[16];
	/* Of the inode and its directories, innermost first; each ends in a zero byte, unless it was cut. */
	u64 names[PATH_NAMES][NAME_BYTES / sizeof(u64)];
};

/* Never holds data: puts the types that user space shares into the skeleton. */
struct {
	struct contended_wait contended_wait;
	enum lock_kind lock_kind;
	enum lock_of lock_of;
	enum contended_limits contended_limits;
} layouts = {};

/* Minimum time that is recorded. */
const volatile u64 contended_from_ns = 50000;

/* Waits that another one replaced, and those without room in the ring. */
u64 lost_contending = 0;
u64 lost_contended = 0;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CONTENDING_THREADS);
	__type(key, u32);
	__type(value, struct contending);
} contending_by_tid SEC(".maps");

/* Too large for the stack; programs do not nest in themselves on a CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct contended_wait);
} wait_at_begin SEC(".maps"), wait_at_end SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 19);
} contended_waits SEC(".maps");

static __always_inline struct contending *contending_here(void)
{
	u32 index = (u32)bpf_get_current_pid_tgid() & (CONTENDING_THREADS - 1);

	return bpf_map_lookup_elem(&contending_by_tid, &index);
}

static __always_inline u64 check_of(const struct contending *of)
{
	u64 check = 0;

	for (u32 i = 0; i < CHECKED_WORDS; i++)
		check = (check << 7 | check >> 57) ^ of->words[i];
	return check;
}

/* A root that is not the file system's is that of a disconnected subtree (NFS): there is no path. */
static __always_inline void end_path(struct contended_wait *wait, const struct dentry *dentry, const struct dentry *root)
{
	wait->is_whole = dentry == root;
	if (!wait->is_whole)
		wait->count = 0;
}

static __always_inline void read_path(struct contended_wait *wait, const struct dentry *dentry, const struct dentry *root)
{
	for (u32 i = 0; i < PATH_NAMES; i++) {
		const struct dentry *parent = BPF_CORE_READ(dentry, d_parent);
		const unsigned char *name = BPF_CORE_READ(dentry, d_name.name);

		if (!dentry || !parent)
			return;
		if (parent == dentry) {
			end_path(wait, dentry, root);
			return;
		}
		if (bpf_probe_read_kernel_str(wait->names[i], NAME_BYTES, name) <= 0)
			return;
		/* A name that is cut fills its place. */
		if (BPF_CORE_READ(dentry, d_name.len) >= NAME_BYTES)
			((char *)wait->names[i])[NAME_BYTES - 1] = '*';
		wait->count = i + 1;
		dentry = parent;
	}
	if (BPF_CORE_READ(dentry, d_parent) == dentry)
		end_path(wait, dentry, root);
}

/* Returns a name of the inode that still exists, or the last one if all were removed; NULL if there is none. */
static __always_inline const struct dentry *name_of(const struct inode *inode, bool is_deleted)
{
	struct hlist_node *alias = BPF_CORE_READ(inode, i_dentry.first);

	for (u32 i = 0; i < ALIASES && alias; i++) {
		const struct dentry *dentry = (const void *)alias - bpf_core_field_offset(struct dentry, d_u.d_alias);

		if (is_deleted || BPF_CORE_READ(dentry, d_hash.pprev))
			return dentry;
		alias = BPF_CORE_READ(alias, next);
	}
	return NULL;
}

static __always_inline void read_inode(struct contended_wait *wait, const struct inode *inode)
{
	const struct dentry *dentry;

	wait->lock_of = LOCK_OF_INODE;
	wait->inode = BPF_CORE_READ(inode, i_ino);
	wait->device = BPF_CORE_READ(inode, i_sb, s_dev);
	wait->is_deleted = !BPF_CORE_READ(inode, i_nlink);
	if (!bpf_core_field_exists(struct dentry, d_u.d_alias))
		return;
	dentry = name_of(inode, wait->is_deleted);
	if (dentry)
		read_path(wait, dentry, BPF_CORE_READ(inode, i_sb, s_root));
}

/* A mutex may be that of a pipe, or of the position of an open file. */
static __always_inline void read_descriptor(struct contended_wait *wait, struct task_struct *task)
{
	const struct file *file = syscall_of(task) >= 0 ? file_of(task, first_argument_of(task)) : NULL;
	u64 pipe;

	if (!file)
		return;
	pipe = (u64)BPF_CORE_READ(file, f_inode, i_pipe);
	if (pipe && wait->lock == pipe + bpf_core_field_offset(struct pipe_inode_info, mutex)) {
		wait->lock_of = LOCK_OF_PIPE;
		wait->inode = BPF_CORE_READ(file, f_inode, i_ino);
	} else if (wait->lock == (u64)file + bpf_core_field_offset(struct file, f_pos_lock)) {
		read_inode(wait, BPF_CORE_READ(file, f_inode));
		wait->lock_of = LOCK_OF_POSITION;
	}
}

static __always_inline void find_lock_of(struct contended_wait *wait, struct task_struct *task)
{
	const struct task_struct *owner;
	const struct inode *inode;

	if (is_of_memory(BPF_CORE_READ(task, mm), wait->lock)) {
		wait->lock_of = LOCK_OF_MEMORY;
		return;
	}
	owner = owner_of_memory(wait->lock);
	if (!owner && bpf_core_type_exists(struct rwbase_rt))
		owner = owner_of_memory(wait->lock - bpf_core_field_offset(struct rwbase_rt, rtmutex));
	if (owner) {
		u64 leader = (u64)BPF_CORE_READ(owner, group_leader);

		wait->lock_of = LOCK_OF_MEMORY;
		wait->memory_of = BPF_CORE_READ(owner, tgid);
		if (own_namespace)
			wait->memory_of = shown_by_address(&leader, wait->memory_of);
		BPF_CORE_READ_STR_INTO(&wait->memory_name, owner, group_leader, comm);
		return;
	}
	inode = wait->kind != LOCK_MUTEX ? inode_of_lock(wait->lock) : NULL;
	if (inode)
		read_inode(wait, inode);
	else if (wait->kind == LOCK_MUTEX || wait->kind == LOCK_RT_MUTEX)
		read_descriptor(wait, task);
}

static __always_inline bool has_signal(const struct task_struct *task)
{
	u64 pending = BPF_CORE_READ(task, pending.signal.sig[0]) | BPF_CORE_READ(task, signal, shared_pending.signal.sig[0]);

	return pending & ~(u64)BPF_CORE_READ(task, blocked.sig[0]);
}

/* Sends what is known of the current thread's wait. Global, so that the verifier checks it once. */
__noinline int send_wait(const struct contending *of, struct contended_wait *wait, u64 now_ns, bool has_ended, int error)
{
	struct task_struct *task = bpf_get_current_task_btf();
	bool is_rwsem_waiter;
	u64 size;

	if (!of || !wait)
		return 0;
	__builtin_memset(wait, 0, __builtin_offsetof(struct contended_wait, names));
	wait->from_ns = of->since_ns;
	wait->to_ns = now_ns;
	wait->lock = of->lock;
	wait->kind = of->kind;
	wait->holder = of->holder;
	__builtin_memcpy(wait->holder_name, of->holder_name, sizeof(wait->holder_name));
	wait->tid = shown_number(task);
	/*
	 * A waiter for an rwsem is woken by the thread that released it, by one that enqueues or takes it before the former wakes anybody, or
	 * by the first waiter when it gives up. With PREEMPT_RT, readers wake each other, and the last one wakes a writer.
	 */
	is_rwsem_waiter = of->kind == LOCK_RWSEM || of->kind == LOCK_RWSEM_READERS;
	wait->is_waker_uncertain = bpf_core_type_exists(struct rwbase_rt) ? of->is_reader : is_rwsem_waiter;
	/* The waker may be the sender of a signal, even if the thread got the lock before it ran again. */
	if (error || has_signal(task))
		wait->is_waker_uncertain = 1;
	else
		wait->reader = of->reader;
	wait->is_taken = has_ended && !error && !(of->kind == LOCK_RT_MUTEX && of->is_reader);
	find_lock_of(wait, task);
	size = __builtin_offsetof(struct contended_wait, names) + wait->count * NAME_BYTES;
	if (size > sizeof(*wait))
		return 0;
	/* No thread is woken: the lock's own wait queue may be locked here. */
	if (bpf_ringbuf_output(&contended_waits, wait, size, BPF_RB_NO_WAKEUP))
		__sync_fetch_and_add(&lost_contended, 1);
	return 0;
}

/* Returns whether the entry is of a wait of this thread for this lock, in which it could sleep, and long enough to be recorded. */
static __always_inline bool is_sleep(const struct contending *known, u64 task, u64 lock, u64 now_ns)
{
	return known->task == task && known->lock == lock && !known->is_spinning && now_ns - known->since_ns >= contended_from_ns &&
	       known->check == check_of(known);
}

static __always_inline u32 number_of(u64 address)
{
	const struct task_struct *task = (const void *)address;

	return own_namespace ? (u32)number_by_address(&address) : (u32)BPF_CORE_READ(task, pid);
}

/* Reads an rwsem's kind, and its writer or the last reader. A writer clears the owner word before it releases the count. */
static __always_inline u64 read_rwsem_owner(struct contending *of, u32 flags)
{
	const struct rw_semaphore *rwsem = (const void *)of->lock;
	u64 count, owner;

	of->kind = LOCK_RWSEM;
	if (!bpf_core_field_exists(rwsem->count) || !bpf_core_field_exists(rwsem->owner))
		return 0;
	count = BPF_CORE_READ(rwsem, count.counter);
	owner = BPF_CORE_READ(rwsem, owner.counter);
	if (count & RWSEM_WRITER_LOCKED)
		return owner & RWSEM_READER_OWNED ? 0 : owner & ~(u64)OWNER_FLAGS;
	if (!(count >> RWSEM_READERS_SHIFT))
		return 0;
	of->kind = LOCK_RWSEM_READERS;
	/* It may have released the lock, and exited: this is no holder by itself. */
	if (flags & LCB_F_WRITE && owner & RWSEM_READER_OWNED)
		of->reader = number_of(owner & ~(u64)OWNER_FLAGS);
	return 0;
}

/* Reads the lock's kind, and its owner, which has not exited by now: the program holds the RCU read lock. */
static __always_inline void read_contended(struct contending *of, u32 flags)
{
	struct wait_for wait = { .lock = of->lock };
	const struct task_struct *holder;

	if (flags & LCB_F_MUTEX) {
		of->kind = LOCK_MUTEX;
		read_mutex(&wait);
	} else if (flags & LCB_F_RT && !(flags & (LCB_F_READ | LCB_F_WRITE))) {
		of->kind = LOCK_RT_MUTEX;
		read_rt_mutex(&wait);
	} else if (flags & LCB_F_RT) {
		/* A writer waits only for readers here: for another writer, it waits for the rt_mutex first. */
		of->kind = flags & LCB_F_READ ? LOCK_RWSEM : LOCK_RWSEM_READERS;
	} else {
		wait.holder = read_rwsem_owner(of, flags);
	}
	if (!wait.holder)
		return;
	of->holder = number_of(wait.holder);
	holder = (const struct task_struct *)wait.holder;
	BPF_CORE_READ_STR_INTO(&of->holder_name, holder, comm);
}

SEC("tp_btf/contention_begin")
int BPF_PROG(on_contention_begin, void *lock, unsigned int flags)
{
	struct contending *known;
	struct contending now = {};
	bool is_part;
	u32 zero = 0;

	/* A spinlock, perhaps of an interrupt; a semaphore; or a percpu rwsem. */
	if ((flags & (LCB_F_SPIN | LCB_F_MUTEX)) == LCB_F_SPIN || !flags || flags & LCB_F_PERCPU)
		return 0;
	known = contending_here();
	if (!known)
		return 0;
	now.since_ns = bpf_ktime_get_ns();
	now.lock = (u64)lock;
	/* A number: the verifier allows no arithmetic with the pointer. */
	now.task = bpf_get_current_task();
	now.is_spinning = flags & LCB_F_SPIN ? 1 : 0;
	now.is_reader = flags & LCB_F_READ ? 1 : 0;
	/* With PREEMPT_RT, a reader blocks on the rt_mutex of the rwsem. */
	is_part = known->task == now.task && known->lock != now.lock && is_in_rwsem(now.lock, known->lock);
	if (is_part)
		now.is_reader = known->is_reader;
	/* Another thread's, or this one's, which blocks on a lock while it queues for another one. */
	if (known->task && !is_part && (known->task != now.task || known->lock != now.lock)) {
		if (!known->is_spinning)
			__sync_fetch_and_add(&lost_contending, 1);
	} else if (is_sleep(known, now.task, now.lock, now.since_ns)) {
		send_wait(known, bpf_map_lookup_elem(&wait_at_begin, &zero), now.since_ns, false, 0);
	}
	if (!now.is_spinning)
		read_contended(&now, flags);
	now.check = check_of(&now);
	*known = now;
	return 0;
}

SEC("tp_btf/contention_end")
int BPF_PROG(on_contention_end, void *lock, int error)
{
	struct contending *known = contending_here();
	const struct task_struct *current;
	u64 now_ns, task;
	u32 zero = 0;

	/* Nearly always the end of a spinlock's, of which nothing is known. */
	if (!known || known->lock != (u64)lock)
		return 0;
	task = bpf_get_current_task();
	if (known->task != task)
		return 0;
	/* The spinlock in an rt_mutex has the same address: it is contended before the thread has the rt_mutex, or gives up. */
	current = bpf_get_current_task_btf();
	if (known->kind == LOCK_RT_MUTEX && bpf_core_field_exists(current->pi_blocked_on) && current->pi_blocked_on)
		return 0;
	now_ns = bpf_ktime_get_ns();
	if (is_sleep(known, task, (u64)lock, now_ns))
		send_wait(known, bpf_map_lookup_elem(&wait_at_end, &zero), now_ns, true, error);
	known->task = 0;
	return 0;
}
