/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The kernel types that the BPF programs read, with only the fields they use. CO-RE relocates every access to the
 * running kernel's layout, so order and completeness do not matter here. No other header describes the kernel.
 */
#pragma once

typedef signed char __s8;
typedef unsigned char __u8;
typedef short __s16;
typedef unsigned short __u16;
typedef int __s32;
typedef unsigned int __u32;
typedef long long __s64;
typedef unsigned long long __u64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;
typedef __u8 u8;
typedef __u16 u16;
typedef __s32 s32;
typedef __u32 u32;
typedef __s64 s64;
typedef __u64 u64;
typedef _Bool bool;

#define true 1
#define false 0
#define NULL ((void *)0)

/* Stable numbers of the BPF system call (include/uapi/linux/bpf.h). */
enum bpf_map_type {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PROG_ARRAY = 3,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_STACK_TRACE = 7,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_RINGBUF = 27,
	BPF_MAP_TYPE_TASK_STORAGE = 29,
};

enum {
	BPF_ANY = 0,
	BPF_RB_AVAIL_DATA = 0,
	BPF_RB_RING_SIZE = 1,
	BPF_RB_NO_WAKEUP = 1,
	BPF_RB_FORCE_WAKEUP = 2,
	BPF_RINGBUF_HDR_SZ = 8,
	BPF_NOEXIST = 1,
};

enum {
	BPF_F_NO_PREALLOC = 1U << 0,
	BPF_LOCAL_STORAGE_GET_F_CREATE = 1U << 0,
};

enum {
	BPF_F_MMAPABLE = 1U << 10,
};

/* A flag of bpf_timer_start() (6.7), and the clock of bpf_ktime_get_ns() (include/uapi/linux/time.h). */
enum {
	BPF_F_TIMER_CPU_PIN = 1U << 1,
	CLOCK_MONOTONIC = 1,
};

/* Opaque to BPF programs; the kernel finds it in a map value by this name (6.10). */
struct bpf_wq {
	__u64 __opaque[2];
} __attribute__((aligned(8)));

/* Opaque to BPF programs; the kernel finds it in a map value by this name (5.15). */
struct bpf_timer {
	__u64 __opaque[2];
} __attribute__((aligned(8)));

/* Bits of a request's flags (include/linux/blk_types.h). */
enum req_flag_bits {
	__REQ_SYNC = 11,
	__REQ_META = 12,
	__REQ_IDLE = 15,
	__REQ_FUA = 17,
	__REQ_PREFLUSH = 18,
	__REQ_RAHEAD = 19,
};

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

typedef struct {
	s64 counter;
} atomic64_t;

typedef struct {
	int counter;
} atomic_t;

struct refcount_struct {
	atomic_t refs;
};

struct list_head {
	struct list_head *next;
};

struct work_struct {
	atomic64_t data;
	struct list_head entry;
	void (*func)(struct work_struct *work);
};

/* An item queued behind another one, which wakes the thread that flushes that item. */
struct wq_barrier {
	struct work_struct work;
	struct task_struct *task;
};

/* With PREEMPT_RT neither mutex nor rw_semaphore has an owner: a thread blocks on the rt_mutex within. */
struct mutex {
	atomic64_t owner;
};

struct rw_semaphore {
	atomic64_t count;
	atomic64_t owner;
};

struct rt_mutex_base {
	struct task_struct *owner;
};

/* With PREEMPT_RT: what an rw_semaphore consists of. */
struct rwbase_rt {
	struct rt_mutex_base rtmutex;
};

struct rt_mutex_waiter {
	struct rt_mutex_base *lock;
};

struct workqueue_attrs {
	int nice;
};

struct worker_pool {
	int cpu;
	int node;
	int id;
	unsigned int flags;
	struct workqueue_attrs *attrs;
};

struct workqueue_struct {
	/* 24 bytes up to 6.8, 32 since. */
	char name[32];
};

struct pool_workqueue {
	struct worker_pool *pool;
	struct workqueue_struct *wq;
};

struct worker {
	void (*current_func)(struct work_struct *work);
	struct pool_workqueue *current_pwq;
	/* Items to run next, mostly barriers. */
	struct list_head scheduled;
	struct task_struct *task;
	struct worker_pool *pool;
	struct workqueue_struct *rescue_wq;
};

struct timerqueue_node {
	s64 expires;
};

struct hrtimer_cpu_base {
	u32 cpu;
};

struct hrtimer_clock_base {
	struct hrtimer_cpu_base *cpu_base;
	/* From CLOCK_MONOTONIC to this clock. */
	s64 offset;
};

struct hrtimer {
	struct timerqueue_node node;
	struct hrtimer_clock_base *base;
	/* The requested expiry; `node` has the thread's timer slack added. */
	s64 _softexpires;
	void *function;
	/* Its function is called in a softirq. */
	u8 is_soft;
};

/* A timer of the timer wheel. */
struct timer_list {
	void *function;
};

struct kernfs_node {
	u64 id;
};

struct cgroup;

struct cgroup_subsys_state {
	struct cgroup *cgroup;
	struct cgroup_subsys_state *parent;
};

struct cfs_bandwidth {
	u64 period;
	u64 quota;
	/* Remaining runtime of the period. */
	u64 runtime;
	struct hrtimer period_timer;
};

struct task_group {
	struct cgroup_subsys_state css;
	struct task_group *parent;
	/* Its cfs_rq on each CPU. */
	struct cfs_rq **cfs_rq;
	struct cfs_bandwidth cfs_bandwidth;
};

struct cfs_rq {
	struct rq *rq;
	/* Its group has a quota itself, and this is the runtime that the cfs_rq has taken from it. */
	int runtime_enabled;
	s64 runtime_remaining;
	/* Number of throttled groups here, from its own upwards. */
	int throttle_count;
	struct task_group *tg;
};

struct rt_rq {
	int rt_throttled;
};

struct sched_rt_entity {
	struct sched_rt_entity *parent;
	struct rt_rq *rt_rq;
};

struct sched_dl_entity {
	/* Replenishes the budget, which is exhausted until then. */
	struct hrtimer dl_timer;
};

struct rq {
	u64 clock;
	u64 clock_task;
	u64 prev_steal_time_rq;
	struct rt_rq rt;
	/* Core scheduling is in use. */
	unsigned int core_enabled;
};

struct sched_entity {
	u64 exec_start;
	u64 sum_exec_runtime;
	/* sum_exec_runtime at the switch-in; only for threads of the fair class. */
	u64 prev_sum_exec_runtime;
	struct cfs_rq *cfs_rq;
};

struct sched_info {
	unsigned long long run_delay;
	unsigned long long last_arrival;
	unsigned long long last_queued;
};

struct thread_info {
	unsigned long flags;
	/* On x86. */
	u32 status;
	u32 cpu;
	/* Not on x86, where it is per CPU. On arm64 these are the lower of 64 bits: only a sign bit could differ. */
	u32 preempt_count;
};

struct cgroup {
	struct cgroup_subsys_state self;
	struct kernfs_node *kn;
};

struct css_set {
	struct cgroup *dfl_cgrp;
	/* By enum cgroup_subsys_id. */
	struct cgroup_subsys_state *subsys[1];
};

enum cgroup_subsys_id {
	memory_cgrp_id = 1,
};

/* Counts in pages. */
struct page_counter {
	atomic64_t usage;
	unsigned long high;
	unsigned long max;
};

struct mem_cgroup {
	struct cgroup_subsys_state css;
	struct page_counter memory;
};

/* x86-64 only: if the kernel has no such fields, user stacks are not read. */
struct pt_regs {
	unsigned long bp;
	unsigned long r10;
	unsigned long si;
	unsigned long di;
	unsigned long orig_ax;
	unsigned long ip;
	unsigned long cs;
	unsigned long sp;
};

struct pt_regs___of_arm64 {
	u64 regs[31];
	u64 pstate;
	u64 orig_x0;
	s32 syscallno;
};

struct ns_common {
	unsigned int inum;
};

struct pid_namespace {
	struct ns_common ns;
};

struct upid {
	int nr;
	struct pid_namespace *ns;
};

/* `numbers` has one for each level. */
struct pid {
	unsigned int level;
	struct upid numbers[1];
};

struct mm_struct {
	struct rw_semaphore mmap_lock;
	unsigned long end_code;
	unsigned long start_stack;
	unsigned long arg_start;
	/* With CONFIG_MEMCG. */
	struct task_struct *owner;
};

struct file;

struct fdtable {
	unsigned int max_fds;
	struct file **fd;
};

struct files_struct {
	struct fdtable *fdt;
};

/* The kernel's sigset_t, a name that the host's headers have as well. */
struct signal_set {
	unsigned long sig[1];
};

struct sigpending {
	struct signal_set signal;
};

struct signal_struct {
	struct sigpending shared_pending;
};

struct task_struct {
	struct thread_info thread_info;
	struct signal_struct *signal;
	struct signal_set blocked;
	struct sigpending pending;
	unsigned int __state;
	int exit_state;
	int on_cpu;
	unsigned int flags;
	int pid;
	int tgid;
	unsigned in_iowait : 1;
	/* With CONFIG_PSI. */
	unsigned in_memstall : 1;
	/* With CONFIG_CGROUPS. */
	unsigned frozen : 1;
	unsigned in_execve : 1;
	u32 self_exec_id;
	struct task_struct *group_leader;
	struct task_struct *real_parent;
	struct pid *thread_pid;
	struct css_set *cgroups;
	struct mem_cgroup *active_memcg;
	struct mm_struct *mm;
	struct files_struct *files;
	struct task_group *sched_task_group;
	int prio;
	int static_prio;
	int nr_cpus_allowed;
	u64 start_time;
	char comm[16];
	struct io_uring_task *io_uring;
	struct rt_mutex_waiter *pi_blocked_on;
	unsigned long nvcsw;
	unsigned long nivcsw;
	struct sched_entity se;
	struct sched_rt_entity rt;
	struct sched_dl_entity dl;
	struct sched_info sched_info;
	void *worker_private;
};

struct kthread {
	void *data;
};

struct gendisk {
	int major;
	int first_minor;
	struct request_queue *queue;
};

struct block_device {
	struct gendisk *bd_disk;
	struct request_queue *bd_queue;
};

struct request_queue {
	struct gendisk *disk;
	const struct blk_mq_ops *mq_ops;
};

struct bvec_iter {
	u64 bi_sector;
	unsigned int bi_size;
};

struct blkcg {
	struct cgroup_subsys_state css;
};

struct blkcg_gq {
	struct blkcg *blkcg;
};

struct bio {
	struct block_device *bi_bdev;
	unsigned int bi_opf;
	u8 bi_status;
	void *bi_private;
	struct bvec_iter bi_iter;
	struct blkcg_gq *bi_blkg;
};

struct request {
	struct request_queue *q;
	unsigned int cmd_flags;
	unsigned int __data_len;
	u64 __sector;
	struct bio *bio;
	void *end_io;
};

struct seq_file;

struct bpf_iter_meta {
	struct seq_file *seq;
};

struct bpf_iter__task {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
};

struct irqaction {
	const char *name;
};

struct hrtimer_sleeper {
	struct hrtimer timer;
	struct task_struct *task;
};

struct hw_perf_event {
	/* For software clocks. */
	struct hrtimer hrtimer;
};

struct perf_event {
	struct hw_perf_event hw;
	u64 id;
};

/* Steal time of a vCPU, written by the hypervisor (arch/x86/include/uapi/asm/kvm_para.h). */
struct kvm_steal_time {
	u64 steal;
};

struct qstr {
	u32 len;
	const unsigned char *name;
};

struct super_block {
	unsigned long s_magic;
	u32 s_dev;
	struct dentry *s_root;
};

struct hlist_node {
	struct hlist_node *next, **pprev;
};

struct hlist_head {
	struct hlist_node *first;
};

struct hlist_bl_node {
	struct hlist_bl_node *next, **pprev;
};

struct dentry {
	struct hlist_bl_node d_hash;
	struct qstr d_name;
	struct dentry *d_parent;
	struct super_block *d_sb;
	union {
		struct hlist_node d_alias;
	} d_u;
};

struct path {
	struct dentry *dentry;
};

struct address_space {
	struct inode *host;
};

struct pipe_inode_info {
	struct mutex mutex;
};

struct inode {
	struct super_block *i_sb;
	unsigned long i_ino;
	unsigned int i_nlink;
	struct rw_semaphore i_rwsem;
	struct hlist_head i_dentry;
	struct address_space i_data;
	struct pipe_inode_info *i_pipe;
};

struct file {
	void *private_data;
	struct inode *f_inode;
	struct path f_path;
	struct mutex f_pos_lock;
};

struct vm_area_struct {
	struct file *vm_file;
};

struct io_uring {
	u32 head;
	u32 tail;
};

struct io_rings {
	struct io_uring sq;
	struct io_uring cq;
};

struct io_wq_work_node;

struct io_wq_work_list {
	struct io_wq_work_node *first;
};

struct io_sq_data {
	struct task_struct *thread;
	unsigned int sq_thread_idle;
	int sq_cpu;
};

struct io_ring_ctx {
	unsigned int flags;
	struct io_rings *rings;
	unsigned int sq_entries;
	unsigned int cq_entries;
	struct io_wq_work_list iopoll_list;
	struct io_sq_data *sq_data;
};

struct io_kiocb {
	struct io_ring_ctx *ctx;
};

struct io_uring_task {
	struct file *registered_rings[16];
};

struct bpf_iter__task_file {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	u32 fd;
	struct file *file;
};

struct timerlat_variables {
	struct task_struct *kthread;
	struct hrtimer timer;
};

#pragma clang attribute pop
