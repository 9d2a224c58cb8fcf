output "nodes" {
  description = "Every host by its name: role, addresses, RDMA devices, GPUs, shape."
  value       = local.nodes
}

output "inventory" {
  description = "What Ansible reads: groups, hosts and each host's variables."
  value       = module.inventory.inventory
}

output "ingress_addresses" {
  description = "Public addresses of the ingress hosts."
  value       = [for name in sort(local.ingress_hosts) : local.public_addresses[name]]
}

output "hourly_cost" {
  description = "US dollars per hour: `known` is the sum over the shapes with a price, `without_price` lists the others, `figures` says what each figure is, of which day and from where."
  value       = module.fleet.hourly_cost
}
