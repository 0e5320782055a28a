//! What a call through the runtime costs over the artifact's own C function: `cargo bench --bench overhead`.
//!
//! The artifact is a fake whose work takes a fraction of a microsecond, so that the difference shows. `raw` is the C
//! call with new input handles and its outputs freed, as every caller must do; `run` is `Model::run`; `eight inputs`
//! shows what the validation of more inputs adds.

#[path = "../tests/fake/mod.rs"]
mod fake;

use std::ffi::{CStr, c_char, c_void};

use criterion::{Criterion, criterion_group, criterion_main};
use fake::{Fake, Memory};
use precast::{Device, Runtime};
use tch::{Kind, Tensor};

type Create = unsafe extern "C" fn(*mut *mut c_void, usize, *const c_char, *const c_char) -> i32;
type Run = unsafe extern "C" fn(
    *mut c_void,
    *mut *mut c_void,
    usize,
    *mut *mut c_void,
    usize,
    *mut c_void,
    *mut c_void,
) -> i32;
type Bind = unsafe extern "C" fn(
    *mut c_void,
    *const (*const c_char, *mut c_void),
    usize,
    bool,
    bool,
) -> i32;

unsafe extern "C" {
    fn aoti_torch_new_tensor_handle(tensor: *mut c_void, made: *mut *mut c_void) -> i32;
    fn aoti_torch_delete_tensor_object(tensor: *mut c_void) -> i32;
}

/// The C functions, called as directly as Rust can.
struct Raw {
    container: *mut c_void,
    run: Run,
    _weights: Tensor,
}

impl Raw {
    fn new(fake: &Fake) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), fake.object()).unwrap();
        let weights = Tensor::from_slice(&[2.0f32]);
        // SAFETY: the fake exports these functions with these types, and is never unloaded.
        unsafe {
            let library = Box::leak(Box::new(libloading::Library::new(file.path()).unwrap()));
            let create: Create = *library
                .get(b"AOTInductorModelContainerCreateWithDevice")
                .unwrap();
            let bind: Bind = *library
                .get(b"AOTInductorModelContainerUpdateUserManagedConstantBufferPairs")
                .unwrap();
            let run: Run = *library
                .get(b"AOTInductorModelContainerRunSingleThreaded")
                .unwrap();
            let mut container = std::ptr::null_mut();
            assert_eq!(
                create(&mut container, 1, c"cpu".as_ptr(), std::ptr::null()),
                0
            );
            let name: &CStr = c"c0";
            let pair = (name.as_ptr(), weights.as_ptr().cast_mut().cast());
            assert_eq!(bind(container, &pair, 1, false, true), 0);
            Self {
                container,
                run,
                _weights: weights,
            }
        }
    }

    fn call(&self, inputs: &[Tensor]) {
        let mut handles = [std::ptr::null_mut(); 8];
        let mut output = std::ptr::null_mut();
        // SAFETY: inputs are what the fake was compiled for; it steals the handles, and the output is freed here.
        unsafe {
            for (handle, input) in handles.iter_mut().zip(inputs) {
                aoti_torch_new_tensor_handle(input.as_ptr().cast_mut().cast(), handle);
            }
            let none = std::ptr::null_mut();
            assert_eq!(
                (self.run)(
                    self.container,
                    handles.as_mut_ptr(),
                    inputs.len(),
                    &mut output,
                    1,
                    none,
                    none
                ),
                0
            );
            aoti_torch_delete_tensor_object(output);
        }
    }
}

fn overhead(criterion: &mut Criterion) {
    for (name, inputs) in [("one input", 1), ("eight inputs", 8)] {
        let fake = Fake {
            inputs,
            ..Fake::sized(2, 2)
        };
        let model = Runtime::over(
            Memory::with(std::slice::from_ref(&fake)).source(),
            Device::Cpu,
        )
        .unwrap();
        let model = model.load("fake").unwrap();
        let raw = Raw::new(&fake);
        let mut tensors = vec![Tensor::ones([2, 2], (Kind::Float, tch::Device::Cpu))];
        tensors.resize_with(inputs, || {
            Tensor::ones([2, 2], (Kind::Int64, tch::Device::Cpu))
        });
        let mut group = criterion.benchmark_group(name);
        group.bench_function("raw", |bench| bench.iter(|| raw.call(&tensors)));
        group.bench_function("run", |bench| {
            bench.iter(|| model.run("f", &tensors).unwrap())
        });
        if inputs == 1 {
            let small = [Tensor::ones([1, 2], (Kind::Float, tch::Device::Cpu))];
            group.bench_function("run padded", |bench| {
                bench.iter(|| model.run("f", &small).unwrap())
            });
            let wrong = [Tensor::ones([2, 2], (Kind::Double, tch::Device::Cpu))];
            group.bench_function("refused", |bench| {
                bench.iter(|| model.run("f", &wrong).unwrap_err())
            });
        }
        group.finish();
    }
}

criterion_group!(benches, overhead);
criterion_main!(benches);
