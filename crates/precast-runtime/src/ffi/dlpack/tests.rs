//! Hand-written producers, and libtorch itself as a producer.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use super::*;

type Old = DLManagedTensor;
type New = DLManagedTensorVersioned;

/// A producer and the number of calls of its deleter.
struct Producer {
    _data: Vec<u64>,
    shape: Vec<i64>,
    strides: Vec<i64>,
    tensor: DLTensor,
    version: DLPackVersion,
    flags: u64,
    deleted: Arc<AtomicUsize>,
}

impl Producer {
    /// Has int32 0, 1, 2, … of these sizes, without gaps.
    fn new(shape: &[i64]) -> Self {
        let count = shape.iter().product::<i64>() as usize;
        let data = (0..count.div_ceil(2) as u64).map(|i| (2 * i) | ((2 * i + 1) << 32));
        let (mut data, mut shape): (Vec<u64>, _) = (data.collect(), shape.to_vec());
        let tensor = DLTensor {
            data: data.as_mut_ptr().cast(),
            device: DLDevice {
                device_type: CPU,
                device_id: 0,
            },
            ndim: shape.len() as i32,
            dtype: Dtype::Int32.into(),
            shape: shape.as_mut_ptr(),
            strides: ptr::null_mut(),
            byte_offset: 0,
        };
        Self {
            _data: data,
            shape,
            strides: Vec::new(),
            tensor,
            version: DLPackVersion { major: 1, minor: 3 },
            flags: 0,
            deleted: Arc::default(),
        }
    }

    fn strided(shape: &[i64], strides: &[i64], count: i64) -> Self {
        let mut made = Self::new(&[count]);
        made.shape = shape.to_vec();
        made.strides = strides.to_vec();
        made.tensor.ndim = shape.len() as i32;
        made.tensor.shape = made.shape.as_mut_ptr();
        made.tensor.strides = made.strides.as_mut_ptr();
        made
    }

    fn capsule(self) -> (Capsule, Arc<AtomicUsize>) {
        let deleted = self.deleted.clone();
        let raw = Box::leak(Box::new(New {
            version: self.version,
            manager_ctx: ptr::null_mut(),
            deleter: Some(delete),
            flags: self.flags,
            dl_tensor: self.tensor,
        }));
        raw.manager_ctx = Box::into_raw(Box::new(self)).cast();
        // SAFETY: it has `ndim` numbers and the memory, except for the field that a test breaks.
        (unsafe { Capsule::from_raw(NonNull::from(raw)) }, deleted)
    }

    /// Returns why it is refused. Its deleter has been called.
    fn refused(self) -> String {
        let (capsule, deleted) = self.capsule();
        let reason = capsule.into_handle().unwrap_err().to_string();
        assert_eq!(deleted.load(SeqCst), 1, "{reason}");
        reason
    }
}

unsafe extern "C" fn delete(raw: *mut New) {
    // SAFETY: a structure of `Producer::capsule`.
    let (raw, producer) = unsafe {
        let raw = Box::from_raw(raw);
        let producer = Box::from_raw(raw.manager_ctx.cast::<Producer>());
        (raw, producer)
    };
    producer.deleted.fetch_add(1, SeqCst);
    drop((raw, producer));
}

/// Returns the tensor of a capsule.
fn described<M: Managed>(capsule: &Capsule<M>) -> DLTensor {
    // SAFETY: a capsule has such a structure.
    unsafe { M::tensor(capsule.0.as_ptr()) }.unwrap()
}

fn numbers<'a>(start: *mut i64, tensor: &DLTensor) -> &'a [i64] {
    // SAFETY: `ndim` numbers of a capsule that lives longer.
    unsafe { slice::from_raw_parts(start, tensor.ndim as usize) }
}

fn row(count: i32) -> Handle {
    let data: Vec<i32> = (0..count).collect();
    Handle::of(&data, &[count.into()], Dtype::Int32).unwrap()
}

fn round<M: Managed>(made: &Handle) {
    let capsule = Capsule::<M>::of(made.share()).unwrap();
    let back = capsule.into_handle().unwrap();
    let (was, is) = (made.meta(), back.meta());
    assert_eq!((is.dtype(), is.device()), (was.dtype(), was.device()));
    assert_eq!((is.sizes(), is.strides()), (was.sizes(), was.strides()));
    assert_eq!(back.read::<u8>().unwrap(), made.read::<u8>().unwrap());
    if span(was.sizes(), was.strides()).unwrap() > 0 {
        assert_eq!(is.address(), was.address());
    }
}

#[test]
fn every_dtype_and_layout_goes_out_and_in_again_over_one_memory() {
    let row = row(48);
    for dtype in Dtype::ALL {
        for (shape, stride) in [
            (&[2, 3][..], &[3, 1][..]),
            (&[3, 2], &[1, 3]),
            (&[2, 2], &[5, 2]),
            (&[4], &[0]),
            (&[1, 3], &[77, 1]),
            (&[], &[]),
            (&[0, 3], &[3, 1]),
            (&[2, 0], &[1, 1]),
        ] {
            let made = row.view(shape, stride, 16, dtype).unwrap();
            round::<New>(&made);
            round::<Old>(&made);
        }
    }
}

/// Compares capsules with those of libtorch's own `toDLPack`, and takes libtorch's.
#[test]
fn a_capsule_is_as_libtorch_makes_it() {
    // `at::toDLPack(const at::Tensor&)` and `at::toDLPackVersioned`.
    compared::<Old>(c"_ZN2at8toDLPackERKNS_6TensorE");
    compared::<New>(c"_ZN2at17toDLPackVersionedERKNS_6TensorE");
}

fn compared<M: Managed>(function: &std::ffi::CStr) {
    type Export<M> = unsafe extern "C" fn(*mut c_void) -> *mut M;

    let row = row(48);
    let this = libloading::os::unix::Library::this();
    // SAFETY: libtorch's symbols are global, and this one takes a reference to a tensor and returns a pointer.
    let export = unsafe { this.get::<Export<M>>(function.to_bytes_with_nul()) }.unwrap();
    for dtype in Dtype::ALL {
        let made = row.view(&[3, 2], &[1, 4], 8, dtype).unwrap();
        // SAFETY: a live tensor; the structure is the caller's.
        let theirs = unsafe { Capsule::<M>::from_raw(NonNull::new(export(made.raw())).unwrap()) };
        let ours = Capsule::<M>::of(made.share()).unwrap();
        let (their, our) = (described(&theirs), described(&ours));
        assert_eq!(their.dtype, our.dtype, "{dtype}");
        assert_eq!((their.device, their.ndim), (our.device, our.ndim));
        assert_eq!(numbers(their.shape, &their), numbers(our.shape, &our));
        assert_eq!(numbers(their.strides, &their), numbers(our.strides, &our));
        let start = |tensor: &DLTensor| tensor.data.addr() + tensor.byte_offset as usize;
        assert_eq!(start(&their), start(&our));
        let taken = theirs.into_handle().unwrap();
        assert_eq!(taken.meta().dtype(), Some(dtype));
        assert_eq!(taken.meta().address(), made.meta().address());
        assert_eq!(taken.read::<u8>().unwrap(), made.read::<u8>().unwrap());
    }
}

/// Gives capsules to libtorch's own `fromDLPack`, which returns a tensor by the C++ ABI of this architecture.
#[cfg(target_arch = "x86_64")]
#[test]
fn libtorch_takes_what_goes_out_and_calls_the_deleter() {
    // `at::fromDLPack(DLManagedTensor*, std::function<void(void*)>)` and `at::fromDLPackVersioned`.
    taken::<Old>(c"_ZN2at10fromDLPackEP15DLManagedTensorSt8functionIFvPvEE");
    taken::<New>(c"_ZN2at19fromDLPackVersionedEP24DLManagedTensorVersionedSt8functionIFvPvEE");
}

#[cfg(target_arch = "x86_64")]
fn taken<M: Managed>(function: &std::ffi::CStr) {
    type Import<M> = unsafe extern "C" fn(*mut c_void, *mut M, *mut [usize; 4]);

    let (memory, deleted) = Producer::new(&[2, 3]).capsule();
    let made = memory.into_handle().unwrap();
    let turned = made.view(&[3, 2], &[1, 3], 0, Dtype::Int32).unwrap();
    drop(made);
    let at = turned.meta().address();
    let capsule = Capsule::<M>::of(turned).unwrap();
    let this = libloading::os::unix::Library::this();
    // An `std::function` without a target: then it calls the structure's deleter.
    let mut none = [0; 4];
    // SAFETY: libtorch's symbols are global. This one writes a tensor, which is one pointer, into memory as `new` gives
    // it, and takes over the structure.
    let theirs = unsafe {
        let import = this.get::<Import<M>>(function.to_bytes_with_nul()).unwrap();
        let place = libc::malloc(size_of::<usize>());
        import(place, capsule.into_raw().as_ptr(), &mut none);
        Handle::from_raw(place).unwrap()
    };
    let meta = theirs.meta();
    assert_eq!((meta.address(), meta.dtype()), (at, Some(Dtype::Int32)));
    assert_eq!((meta.sizes(), meta.strides()), (&[3, 2][..], &[1, 3][..]));
    assert_eq!(theirs.read::<i32>().unwrap(), [0, 3, 1, 4, 2, 5]);
    assert_eq!(deleted.load(SeqCst), 0);
    drop(theirs);
    assert_eq!(deleted.load(SeqCst), 1);
}

#[test]
fn memory_of_a_producer_is_read_from_where_it_says() {
    let (capsule, _) = Producer::new(&[2, 3]).capsule();
    let dense = capsule.into_handle().unwrap();
    assert_eq!(dense.meta().strides(), [3, 1]);
    assert_eq!(dense.read::<i32>().unwrap(), [0, 1, 2, 3, 4, 5]);

    let mut turned = Producer::strided(&[3, 2], &[1, 4], 12);
    turned.tensor.byte_offset = 3 * 4;
    turned.tensor.device = DLDevice {
        device_type: CUDA_HOST,
        device_id: 0,
    };
    let at = turned.tensor.data.addr();
    let (capsule, _) = turned.capsule();
    let turned = capsule.into_handle().unwrap();
    assert_eq!(turned.meta().device(), Some(Device::Cpu));
    assert_eq!(turned.meta().address(), at + 12);
    assert_eq!(turned.read::<i32>().unwrap(), [3, 7, 4, 8, 5, 9]);
}

#[test]
fn the_deleter_is_called_once_with_the_last_handle() {
    let (capsule, deleted) = Producer::new(&[8]).capsule();
    let first = capsule.into_handle().unwrap();
    let second = first.share();
    let part = first.view(&[2], &[1], 8, Dtype::Int32).unwrap();
    let (again, out) = (first.share(), Capsule::<New>::of(first.share()).unwrap());
    drop((first, second, again));
    assert_eq!(deleted.load(SeqCst), 0);
    assert_eq!(part.read::<i32>().unwrap(), [2, 3]);
    std::thread::spawn(move || drop(part)).join().unwrap();
    assert_eq!(deleted.load(SeqCst), 0, "a capsule has it");
    drop(out);
    assert_eq!(deleted.load(SeqCst), 1);
}

#[test]
fn a_capsule_that_nobody_takes_and_one_without_elements_are_deleted_at_once() {
    let (capsule, deleted) = Producer::new(&[8]).capsule();
    let raw = capsule.into_raw();
    assert_eq!(deleted.load(SeqCst), 0, "it was given away");
    // SAFETY: given away above.
    drop(unsafe { Capsule::from_raw(raw) });
    assert_eq!(deleted.load(SeqCst), 1);

    let mut none = Producer::strided(&[1 << 40, 0, 1 << 40], &[0, 1, 1], 0);
    none.tensor.data = ptr::null_mut();
    let (capsule, deleted) = none.capsule();
    let none = capsule.into_handle().unwrap();
    assert_eq!(deleted.load(SeqCst), 1);
    assert_eq!(none.meta().sizes(), [1 << 40, 0, 1 << 40]);
    drop(none);
    assert_eq!(deleted.load(SeqCst), 1);
    // One with a null deleter owns nothing.
    let (capsule, deleted) = Producer::new(&[8]).capsule();
    let raw = capsule.into_raw().as_ptr();
    // SAFETY: given away above; it is deleted here, after the tensor.
    unsafe {
        (*raw).deleter = None;
        let handle = Capsule::from_raw(NonNull::new(raw).unwrap()).into_handle();
        assert_eq!(handle.unwrap().read::<i32>().unwrap().len(), 8);
        assert_eq!(deleted.load(SeqCst), 0);
        delete(raw);
    }
}

#[test]
fn what_goes_out_lives_as_long_as_its_capsule() {
    let made = row(6).view(&[2, 2], &[3, 1], 4, Dtype::Int32).unwrap();
    let capsule = Capsule::<New>::of(made).unwrap();
    let tensor = described(&capsule);
    assert_eq!(numbers(tensor.shape, &tensor), [2, 2]);
    assert_eq!(numbers(tensor.strides, &tensor), [3, 1]);
    // SAFETY: the capsule has the memory: 5 numbers.
    let seen = unsafe { slice::from_raw_parts(tensor.data.cast::<i32>(), 5) };
    assert_eq!(seen, [1, 2, 3, 4, 5]);
    // SAFETY: it is the deleter's to free it, once.
    unsafe {
        let raw = capsule.into_raw().as_ptr();
        assert_eq!(((*raw).version.major, (*raw).flags), (1, 0));
        (*raw).deleter.unwrap()(raw);
    }
    let none = Handle::empty(&[2, 0], &[1, 1], Dtype::Int32, Device::Cpu).unwrap();
    let none = Capsule::<Old>::of(none).unwrap();
    assert!(described(&none).data.is_null());
}

#[test]
fn a_hostile_capsule_is_refused_by_name() {
    let told = |change: &dyn Fn(&mut Producer)| {
        let mut made = Producer::strided(&[2, 3], &[3, 1], 6);
        change(&mut made);
        made.refused()
    };
    insta::assert_snapshot!(told(&|p| p.version = DLPackVersion { major: 2, minor: 1 }), @"it is of DLPack 2.1: only 1.x is supported");
    insta::assert_snapshot!(told(&|p| p.version.major = 0), @"it is of DLPack 0.3: only 1.x is supported");
    insta::assert_snapshot!(told(&|p| p.flags = READ_ONLY), @"it is read-only, and a tensor's memory may be written to");
    insta::assert_snapshot!(told(&|p| p.tensor.ndim = -1), @"its `ndim` is -1, not one of 0 to 64");
    insta::assert_snapshot!(told(&|p| p.tensor.ndim = i32::MAX), @"its `ndim` is 2147483647, not one of 0 to 64");
    insta::assert_snapshot!(told(&|p| p.tensor.shape = ptr::null_mut()), @"its `shape` is null, and its `ndim` is 2");
    insta::assert_snapshot!(told(&|p| p.shape[1] = -3), @"its `shape` is [2, -3], and no number may be below 0");
    insta::assert_snapshot!(told(&|p| p.strides[0] = -3), @"its `strides` is [-3, 1], and no number may be below 0");
    insta::assert_snapshot!(told(&|p| p.shape[0] = i64::MAX), @"no tensor has sizes [9223372036854775807, 3] and strides [3, 1]");
    insta::assert_snapshot!(told(&|p| p.shape[0] = 1 << 60), @"int32 [1152921504606846976, 3] with strides [3, 1] at byte 0 lies in no memory");
    insta::assert_snapshot!(told(&|p| p.tensor.byte_offset = u64::MAX), @"int32 [2, 3] with strides [3, 1] at byte 18446744073709551615 lies in no memory");
    insta::assert_snapshot!(told(&|p| p.tensor.data = ptr::null_mut()), @"its `data` is null, and its `shape` is [2, 3]");
    insta::assert_snapshot!(told(&|p| p.tensor.byte_offset = 2), @"its element 0 is not aligned for int32");
}

#[test]
fn other_dtypes_and_devices_are_refused_by_name() {
    let dtype = |code, bits, lanes| {
        let mut made = Producer::new(&[2]);
        made.tensor.dtype = DLDataType { code, bits, lanes };
        made.refused()
    };
    insta::assert_snapshot!(dtype(5, 64, 1), @"its dtype is `complex64`, which no module takes");
    insta::assert_snapshot!(dtype(2, 32, 4), @"its dtype is `float32x4`, which no module takes");
    insta::assert_snapshot!(dtype(2, 32, 0), @"its dtype is `float32x0`, which no module takes");
    insta::assert_snapshot!(dtype(1, 16, 1), @"its dtype is `uint16`, which no module takes");
    insta::assert_snapshot!(dtype(6, 1, 1), @"its dtype is `bool1`, which no module takes");
    insta::assert_snapshot!(dtype(10, 8, 1), @"its dtype is `code 10, bits 8`, which no module takes");
    insta::assert_snapshot!(dtype(255, 255, 65535), @"its dtype is `code 255, bits 255x65535`, which no module takes");

    let device = |device_type, device_id| {
        let mut made = Producer::new(&[2]);
        made.tensor.device = DLDevice {
            device_type,
            device_id,
        };
        made.refused()
    };
    insta::assert_snapshot!(device(10, 0), @"it is on device 0 of type 10, which is neither the CPU nor CUDA");
    insta::assert_snapshot!(device(13, 0), @"it is on device 0 of type 13, which is neither the CPU nor CUDA");
    insta::assert_snapshot!(device(0, 0), @"it is on device 0 of type 0, which is neither the CPU nor CUDA");
    insta::assert_snapshot!(device(CUDA, -1), @"it is on device -1 of type 2, which is neither the CPU nor CUDA");
    let none = device(CUDA, 99);
    assert!(none.starts_with("it is on `cuda:99`"), "{none}");
}
