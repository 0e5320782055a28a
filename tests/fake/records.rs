// Included by mod.rs, and by the examples of the documentation through example.rs: no inner attributes here.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

use precast_runtime::{
    Model, Runtime,
    command::{host, sealed},
    sources::{Source, SourceError},
};
use precast_store::{
    Device, Digest, Mapped, Store, Target,
    record::{
        Artifact, ArtifactKind, Constant, Dtype, First, Follow, Input, Layout, Output, Pad,
        Program, Release, State, Step,
    },
    testing,
};
use serde_json::Value;

/// Opens the libtorch of the checkout, where the process has none.
pub fn libtorch() {
    let folder = std::env::var_os("LIBTORCH").map(PathBuf::from);
    precast_runtime::Runtime::libtorch(folder.as_deref(), false).unwrap();
}

/// Returns the folder that has tests/: that of the package, or one above it.
fn checkout() -> PathBuf {
    let mut above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    above
        .find(|folder| folder.join("tests/fake").exists())
        .unwrap()
        .to_owned()
}

/// Returns the shared object of a source in the checkout, compiled with these options at most once.
pub fn compiled(source: impl AsRef<Path>, options: &[String]) -> PathBuf {
    let source = checkout().join(source);
    let text = fs::read(&source).unwrap();
    let name = Digest::of(&[text, options.join(" ").into_bytes()].concat());
    // Cargo names a temporary folder only for integration tests.
    let folder = option_env!("CARGO_TARGET_TMPDIR").map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| checkout().join("target/tmp"));
    let folder = folder.join("fakes");
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join(format!("{}.so", name.short()));
    if !path.exists() {
        let unfinished = tempfile::NamedTempFile::new_in(&folder).unwrap();
        let c = source.extension().is_some_and(|end| end == "c");
        let mut compile = Command::new(if c { "gcc" } else { "g++" });
        compile
            .args(["-O1", "-shared", "-fPIC", "-o"])
            .arg(unfinished.path());
        let status = compile.arg(source).args(options).status();
        assert!(status.unwrap().success(), "{compile:?}");
        unfinished.persist(&path).unwrap();
    }
    path
}

/// The options of a fake artifact.
#[derive(Clone, Debug)]
pub struct Fake {
    pub rows: i64,
    pub cols: i64,
    pub inputs: usize,
    /// Whether it keeps a state, `total`, which it adds `x` to.
    pub state: bool,
    pub outputs: usize,
    pub constants: usize,
    /// How many elements each constant has.
    pub elements: i64,
    /// One of the behaviours of `misbehaving.cpp`, by name.
    pub behaviour: &'static str,
    pub salt: u32,
}

impl Default for Fake {
    fn default() -> Self {
        Self {
            rows: 8,
            cols: 4,
            inputs: 1,
            state: false,
            outputs: 1,
            constants: 1,
            elements: 1,
            behaviour: "OK",
            salt: 0,
        }
    }
}

impl Fake {
    pub fn of(behaviour: &'static str) -> Self {
        Self {
            behaviour,
            ..Self::default()
        }
    }

    pub fn sized(rows: i64, cols: i64) -> Self {
        Self {
            rows,
            cols,
            ..Self::default()
        }
    }

    pub fn inputs(self, inputs: usize) -> Self {
        Self { inputs, ..self }
    }

    pub fn stateful(self) -> Self {
        Self {
            state: true,
            ..self
        }
    }

    pub fn outputs(self, outputs: usize) -> Self {
        Self { outputs, ..self }
    }

    pub fn constants(self, constants: usize) -> Self {
        Self { constants, ..self }
    }

    pub fn elements(self, elements: i64) -> Self {
        Self { elements, ..self }
    }

    pub fn behaving(self, behaviour: &'static str) -> Self {
        Self { behaviour, ..self }
    }

    /// Returns one whose object no other test loads.
    pub fn salted(self, salt: u32) -> Self {
        Self { salt, ..self }
    }

    /// Returns the shared object.
    pub fn object(&self) -> Vec<u8> {
        let options = [
            format!("-DROWS={}", self.rows),
            format!("-DCOLS={}", self.cols),
            format!("-DINPUTS={}", self.inputs),
            format!("-DSTATE={}", i32::from(self.state)),
            format!("-DOUTPUTS={}", self.outputs),
            format!("-DCONSTANTS={}", self.constants),
            format!("-DELEMENTS={}", self.elements),
            format!("-DBEHAVIOUR={}", self.behaviour),
            format!("-DSALT={}", self.salt),
        ];
        fs::read(compiled("tests/fake/misbehaving.cpp", &options)).unwrap()
    }

    /// Returns the artifact's record for the object with this digest.
    pub fn artifact(&self, object: Digest) -> Artifact {
        let constants = (0..self.constants).map(|i| Constant {
            name: match i {
                0 => "scale".to_owned(),
                _ => format!("shift.{}", i - 1),
            },
            layout: layout(Dtype::Float32, &[self.elements]),
        });
        let id = Digest::of(format!("artifact {object}").as_bytes());
        Artifact {
            id,
            target: target(),
            inputs: (0..self.inputs)
                .map(|i| layout(input_dtype(i), &[self.rows, self.cols]))
                .chain(self.states().into_iter().map(|state| state.layout))
                .collect(),
            outputs: self.output_layouts(),
            constants: constants.collect(),
            key: Value::Null,
            ..testing::artifact_of("fake", object, 0)
        }
    }

    /// Returns a program of one step: `batch` and `seq` are bucketed, `x` pads with 0.
    pub fn program(&self, module: &str, artifact: &Artifact) -> Program {
        let inputs = (0..self.inputs).map(|i| {
            let name = match i {
                0 => "x".to_owned(),
                _ => format!("ids.{}", i - 1),
            };
            let layout = layout(input_dtype(i), &[self.rows, self.cols]);
            input(&name, layout, &[Some("batch"), Some("seq")])
        });
        let dims = [vec![follow("batch"), follow("seq")], vec![follow("batch")]];
        let layouts = self.output_layouts().into_iter().zip(dims);
        let outputs = ["y", "sum"].into_iter().zip(layouts);
        let outputs = outputs.map(|(name, (layout, dims))| Output {
            name: name.to_owned(),
            layout,
            dims,
        });
        let given = self.inputs + usize::from(self.state);
        let names = artifact.constants.iter().map(|c| &c.name);
        let sizes = [("batch", self.rows), ("seq", self.cols)];
        Program {
            id: Digest::of(format!("program {module} {}", artifact.id).as_bytes()),
            module: module.to_owned(),
            sizes: sizes.map(|(dim, size)| (dim.to_owned(), size)).into(),
            target: target(),
            inputs: inputs.collect(),
            states: self.states(),
            outputs: outputs.collect(),
            results: (given..given + self.outputs).collect(),
            values: given + self.outputs,
            steps: vec![Step {
                name: "whole".to_owned(),
                artifact: artifact.id,
                inputs: (0..given).collect(),
                outputs: (given..given + self.outputs).collect(),
                binding: names.map(|name| (name.clone(), name.clone())).collect(),
            }],
            request: Value::Null,
            ..testing::program("fake", self.rows, &[])
        }
    }

    fn states(&self) -> Vec<State> {
        let state = State {
            name: "total".to_owned(),
            layout: layout(Dtype::Float32, &[self.rows, self.cols]),
            dims: vec![None, None],
            first: First::Zeros,
        };
        if self.state { vec![state] } else { vec![] }
    }

    fn output_layouts(&self) -> Vec<Layout> {
        let all = [
            layout(Dtype::Float32, &[self.rows, self.cols]),
            layout(Dtype::Float32, &[self.rows]),
        ];
        all[..self.outputs].to_vec()
    }
}

fn input_dtype(i: usize) -> Dtype {
    if i == 0 { Dtype::Float32 } else { Dtype::Int64 }
}

/// Returns an input that pads with 0.
pub fn input(name: &str, layout: Layout, dims: &[Option<&str>]) -> Input {
    Input {
        name: name.to_owned(),
        layout,
        dims: dims.iter().map(|dim| dim.map(str::to_owned)).collect(),
        pad: Pad::Int(0),
        range: None,
        within: None,
        bounds: None,
        default: None,
    }
}

/// Returns an axis of an output that is as long as a dimension.
fn follow(dim: &str) -> Option<Follow> {
    Some(Follow {
        dim: dim.to_owned(),
        scale: 1,
        offset: 0,
    })
}

/// Returns a contiguous layout.
pub fn layout(dtype: Dtype, shape: &[i64]) -> Layout {
    let mut stride = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        stride[axis - 1] = stride[axis] * shape[axis];
    }
    Layout {
        dtype,
        shape: shape.to_vec(),
        stride,
    }
}

/// Returns this host's target for the CPU.
pub fn target() -> Target {
    libtorch();
    host(Device::Cpu).unwrap()
}

/// Returns a safetensors object of float32 tensors.
pub fn weights(tensors: &[(&str, &[f32])]) -> Vec<u8> {
    let bytes = |(_, values): &(_, &[f32])| values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let bytes: Vec<Vec<u8>> = tensors.iter().map(bytes).collect();
    let views = tensors.iter().zip(&bytes).map(|((name, values), bytes)| {
        let (dtype, shape) = (safetensors::Dtype::F32, vec![values.len()]);
        let view = safetensors::tensor::TensorView::new(dtype, shape, bytes);
        (*name, view.unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

/// A source that holds everything in memory.
#[derive(Default)]
pub struct Memory {
    pub objects: HashMap<Digest, Vec<u8>>,
    pub artifacts: HashMap<Digest, Artifact>,
    pub programs: HashMap<Digest, Program>,
    pub weights: Option<Digest>,
    pub aliases: BTreeMap<String, String>,
}

impl Memory {
    /// Adds an object and returns its digest.
    pub fn put(&mut self, bytes: Vec<u8>) -> Digest {
        let digest = Digest::of(&bytes);
        self.objects.insert(digest, bytes);
        digest
    }

    /// Adds a fake artifact and a program of one step for it.
    pub fn add(&mut self, module: &str, fake: &Fake) -> Program {
        let object = self.put(fake.object());
        let artifact = fake.artifact(object);
        let program = fake.program(module, &artifact);
        self.artifacts.insert(artifact.id, artifact);
        self.programs.insert(program.id, program.clone());
        program
    }

    /// Adds a fake artifact, and a program of the module `f` that has an exported graph beside it, with `scale` = 2:
    /// see [`Self::export`].
    pub fn add_with_graph(&mut self, fake: &Fake) {
        let mut program = self.add("f", fake);
        self.export(&mut program, fake);
        self.programs.insert(program.id, program);
        self.weights = Some(self.put(weights(&[("scale", &[2.0])])));
    }

    /// Gives a program an exported graph: `(x, scale) -> (softmax(x * scale, -1), (x * scale).sum(-1))` at `x` float32
    /// [4, 4] and `scale` float32 [1].
    pub fn export(&mut self, program: &mut Program, fake: &Fake) {
        let object = self.put(include_bytes!("../data/scale.json").to_vec());
        let mut artifact = fake.artifact(object);
        artifact.id = Digest::of(b"exported");
        artifact.kind = ArtifactKind::Graph;
        program.eager = Some(precast_store::record::Eager {
            artifact: artifact.id,
            weights: vec!["scale".to_owned()],
        });
        self.artifacts.insert(artifact.id, artifact);
    }

    /// Publishes everything as the newest release of `model`.
    pub fn publish(&mut self, store: &Store, model: &str) {
        for bytes in self.objects.values() {
            store.objects().put_bytes(bytes).unwrap();
        }
        precast_shim::testing::compiled().put(store);
        for artifact in self.artifacts.values() {
            store.records().put_artifact(artifact).unwrap();
        }
        for program in self.programs.values_mut() {
            program.model = model.to_owned();
            store.records().put_program(program).unwrap();
        }
        let release = self.release(model, None).unwrap();
        store.releases().put(&release).unwrap();
    }

    /// Returns a source with `fakes` as the buckets of the module `f`, and `scale` = 2, `shift.i` = i + 1.
    pub fn with(fakes: &[Fake]) -> Self {
        let mut memory = Self::default();
        for fake in fakes {
            memory.add("f", fake);
        }
        let shifts: [(&str, &[f32]); 2] = [("shift.0", &[1.0]), ("shift.1", &[2.0])];
        let set = weights(&[("scale", &[2.0]), shifts[0], shifts[1]]);
        memory.weights = Some(memory.put(set));
        memory
    }

    pub fn source(self) -> Arc<dyn Source> {
        Arc::new(self)
    }

    /// Returns a runtime for the CPU over this source.
    pub fn runtime(self) -> Runtime {
        Runtime::over(self.source(), Device::Cpu).unwrap()
    }

    /// Returns the model, on the CPU.
    pub fn load(self) -> Model {
        self.runtime().load("fake").unwrap()
    }

    /// Changes each program.
    pub fn each_program(mut self, change: impl FnMut(&mut Program)) -> Self {
        self.programs.values_mut().for_each(change);
        self
    }

    /// Changes each artifact.
    pub fn each_artifact(mut self, change: impl FnMut(&mut Artifact)) -> Self {
        self.artifacts.values_mut().for_each(change);
        self
    }

    /// Returns the object of a program's only artifact.
    pub fn object_of(&self, program: &Program) -> Digest {
        self.artifacts[&program.steps[0].artifact].object
    }

    /// Adds a program that runs as an exported graph, with int64 inputs `ids` [1, tokens], `at` [tokens] and `extra`
    /// [1], and an output of the sizes of `ids`. Other buckets are told apart by `rows`.
    pub fn add_graph(&mut self, module: &str, rows: i64, tokens: i64, graph: &str) -> Program {
        let fake = Fake::sized(rows, tokens).constants(0);
        let mut program = self.add(module, &fake);
        let object = self.put(graph.into());
        let mut artifact = fake.artifact(object);
        artifact.kind = ArtifactKind::Graph;
        let ids = layout(Dtype::Int64, &[1, tokens]);
        let at = layout(Dtype::Int64, &[tokens]);
        program.inputs = vec![
            input("ids", ids.clone(), &[None, Some("seq")]),
            input("at", at, &[Some("seq")]),
            input("extra", layout(Dtype::Int64, &[1]), &[None]),
        ];
        program.inputs[1].within = Some("context".to_owned());
        program.outputs = vec![Output {
            name: "sum".to_owned(),
            layout: ids,
            dims: vec![None, follow("seq")],
        }];
        program.sizes = [("seq".to_owned(), tokens)].into();
        program.steps.clear();
        program.eager = Some(precast_store::record::Eager {
            artifact: artifact.id,
            weights: vec![],
        });
        self.artifacts.insert(artifact.id, artifact);
        self.programs.insert(program.id, program.clone());
        program
    }
}

impl Source for Memory {
    fn release(&self, model: &str, name: Option<&str>) -> Result<Release, SourceError> {
        let programs: Vec<Digest> = self.programs.keys().copied().collect();
        Ok(Release {
            seq: 1,
            shims: vec![precast_shim::testing::compiled().shim.clone()],
            weights: self.weights,
            aliases: self.aliases.clone(),
            ..testing::release(model, name, &programs)
        })
    }

    fn program(&self, id: &Digest) -> Result<Program, SourceError> {
        let found = self.programs.get(id).cloned();
        found.ok_or_else(|| "no such program".into())
    }

    fn artifact(&self, key: &Digest) -> Result<Artifact, SourceError> {
        let found = self.artifacts.get(key).cloned();
        found.ok_or_else(|| "no such artifact".into())
    }

    fn memfd(&self, object: &Digest) -> Result<File, SourceError> {
        let shim = precast_shim::testing::compiled();
        if let Some(path) = shim.file_of(object) {
            return Ok(sealed("shim", &fs::read(path)?)?);
        }
        let bytes = self.objects.get(object).ok_or("no such object")?;
        Ok(sealed("fake", bytes)?)
    }

    fn map(&self, object: &Digest) -> Result<Mapped, SourceError> {
        Ok(Mapped::sealed(&self.memfd(object)?)?)
    }
}

type Hook = dyn Fn(&Digest) -> Result<Option<File>, SourceError> + Send + Sync;

/// A memory with a hook that is called before a shared object or an exported graph is read, and may give another file.
pub struct Hooked {
    memory: Memory,
    hook: Box<Hook>,
}

impl Hooked {
    pub fn over(
        memory: Memory,
        hook: impl Fn(&Digest) -> Result<Option<File>, SourceError> + Send + Sync + 'static,
    ) -> Arc<dyn Source> {
        let hook = Box::new(hook);
        Arc::new(Self { memory, hook })
    }
}

impl Source for Hooked {
    fn release(&self, model: &str, name: Option<&str>) -> Result<Release, SourceError> {
        self.memory.release(model, name)
    }

    fn program(&self, id: &Digest) -> Result<Program, SourceError> {
        self.memory.program(id)
    }

    fn artifact(&self, key: &Digest) -> Result<Artifact, SourceError> {
        self.memory.artifact(key)
    }

    fn memfd(&self, object: &Digest) -> Result<File, SourceError> {
        match (self.hook)(object)? {
            Some(file) => Ok(file),
            None => self.memory.memfd(object),
        }
    }

    fn map(&self, object: &Digest) -> Result<Mapped, SourceError> {
        self.memory.map(object)
    }
}
